"""Megatron sources: what arrives is, bit for bit, the checkpoint, and after training what mbridge itself exports.

Real verl engines, megatron-core and mbridge over gloo, the real sharding manager up to the plan, real staging memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from worlds import run_world, stop

from bare_engine.endpoint import BareEngineEndpoint
from megatron_cpu import checkpoints
from megatron_cpu.engines import Layout, build, megatron_environment, stock_export, train_step
from verl_sync_plugin.config import SyncConfig
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sharding_manager.base import ShardingManager
from verl_sync_plugin.transport.sender import SLOTS
from verl_sync_plugin.transport.staging import open_staging, slot_of

State = dict[str, torch.Tensor]

CPU = torch.device("cpu")
TINY, LARGE = 6_001, 64 << 20  # bytes; TINY is no multiple of anything
SYNCS = 3

CASES = [
    ("qwen2", Layout(1)),
    ("qwen2", Layout(2)),
    ("qwen2", Layout(2, tp=2)),
    ("qwen3", Layout(2, pp=2)),
    ("qwen2", Layout(2, pp=2, vpp=2)),
    ("qwen2", Layout(2, cp=2)),
    ("qwen2", Layout(4, tp=2)),
    ("qwen2", Layout(4, tp=2, pp=2)),
    ("qwen2-tied", Layout(2, pp=2)),
    ("qwen2-tied", Layout(2, pp=2, vpp=2)),
    ("qwen2-tied", Layout(2, tp=2)),
    ("qwen3-moe", Layout(2, ep=2)),
    ("qwen3-moe", Layout(2, tp=2, ep=2, etp=1)),
    ("qwen3-moe", Layout(2, tp=2, ep=1, etp=2)),
    ("qwen3-moe", Layout(4, tp=2, ep=2, etp=2)),
    ("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1)),
    ("moonlight", Layout(2, tp=2, ep=2, etp=1)),
    ("moonlight", Layout(4, ep=2, pp=2, vpp=2)),
    ("deepseek", Layout(2, tp=2)),
]


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Fresh processes: Megatron on the CPU replaces CUDA functions, which the other tests' processes must not have."""
    stop()
    with megatron_environment():
        yield
    stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            made[kind] = checkpoints.write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def manager_of(engine: Any, bucket_bytes: int) -> ShardingManager:
    manager_class = get_sharding_manager("megatron", "sglang")
    return manager_class(engine, BareEngineEndpoint(None), SyncConfig(timeout_seconds=20), bucket_bytes, CPU)


def one_sync(manager: ShardingManager) -> State:
    """Everything that arrives; the trainer is not written to."""
    before = [p._version for chunk in manager.engine.module for p in chunk.parameters()]
    with manager:
        got = deliver(manager)
    assert before == [p._version for chunk in manager.engine.module for p in chunk.parameters()]
    return got


def deliver(manager: ShardingManager) -> State:
    """Runs all buckets through the manager's staging memory; a mapping of its own reads it, as in the engine."""
    plan, source, sender = manager._plan, manager._source, manager._sender
    assert plan is not None and source is not None
    export = sender._staging.export()  # type: ignore[union-attr]  # what Hello carries
    assert export.nbytes <= SLOTS * manager._bucket_bytes
    memory = open_staging(export)
    rank = 0 if source.group is None else dist.get_rank(source.group)
    assembler = Assembler(frozenset(entry.name for bucket in plan.buckets for entry in bucket.entries))
    got: State = {}
    for index, bucket in enumerate(plan.buckets):
        assert bucket.nbytes <= manager._bucket_bytes
        slot = slot_of(memory, index % SLOTS, export.slot_bytes)
        slot.fill_(0xEE)
        sender.pack(bucket, index % SLOTS, manager._shards, rank)
        sender.gather(bucket, index % SLOTS, rank, source.group)
        for name, tensor in assembler.tensors(slot, bucket.entries):
            assert name not in got, f"{name} came twice"
            got[name] = tensor.clone()
    assembler.finish()
    return got


def check_same(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    different = [n for n, t in expected.items() if got[n].shape != t.shape or not torch.equal(got[n], t)]
    assert not different, different


def on_disk(folder: str) -> State:
    found: State = {}
    for file in Path(folder).glob("*.safetensors"):
        found.update(load_file(file))
    return found


def syncs(model_path: str, layout: Layout) -> list[str]:
    """Three syncs with two bucket sizes each and a training step in between; returns the plans' digests."""
    engine = build(model_path, layout)
    managers = [manager_of(engine, size) for size in (TINY, LARGE)]
    expected, digests = on_disk(model_path), []
    for step in range(SYNCS):
        if step:
            train_step(engine)
            last, expected = expected, stock_export(engine)
            same = [name for name, tensor in expected.items() if torch.equal(tensor, last[name])]
            assert not same, f"training must have changed everything: {same}"
        for manager in managers:
            got = one_sync(manager)
            biases = {name for name in got if name.endswith("e_score_correction_bias")}
            assert all(got[name].dtype == torch.float32 for name in biases), "the router's bias stays as it is"
            if not step:
                got.update({name: got[name].bfloat16() for name in biases})  # the checkpoint has it in bfloat16
            check_same(got, expected)
            digests.append(manager._agreed_digest)
    return digests


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=lambda value: str(value))
def test_every_tensor_arrives_bit_for_bit(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    digests = run_world(layout.world, syncs, checkpoint(kind), layout, timeout=180)
    assert digests[0] == digests[0][:2] * SYNCS, "the plan must not change while the layout does not"
    if layout.world == layout.tp * layout.pp:
        assert all(of_rank == digests[0] for of_rank in digests), "the ranks planned differently"
