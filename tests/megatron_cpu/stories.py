# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the contract tests do; module-level functions, so that spawned processes can import them.

Real verl engines, megatron-core and Megatron-Bridge over gloo, the real sharding manager up to the plan, real staging
memory.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bare_engine.endpoint import BareEngineEndpoint
from contract.reading import Reader
from megatron_cpu.engines import Layout, build, stock_export, train_step
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.sender import STAGING_BUCKETS
from verl_sync_plugin.sync.ways import Sync
from verl_sync_plugin.trainers.megatron.model import unwrapped
from verl_sync_plugin.trainers.megatron.trainer import MegatronSource

State = dict[str, torch.Tensor]

CPU = torch.device("cpu")
TINY, LARGE = 6_001, 64 << 20  # bytes; TINY is no multiple of anything
SYNCS = 3


def manager_of(engine: Any, bucket_bytes: int, wire: str = "bfloat16", delivery: str = "auto") -> ShardingManager:
    manager_class = get_sharding_manager("megatron", "sglang")
    config = SyncConfig(timeout_seconds=20, delivery=delivery)
    return manager_class(engine, BareEngineEndpoint(None), config, bucket_bytes, CPU, wire)


def one_sync(manager: ShardingManager) -> State:
    """Everything that arrives; the trainer is not written to."""
    before = [p._version for chunk in manager.engine.module for p in chunk.parameters()]
    sync, _ = manager.plan("one")
    got = deliver(manager, sync)
    sync.source.release()
    assert before == [p._version for chunk in manager.engine.module for p in chunk.parameters()]
    return got


def deliver(manager: ShardingManager, sync: Sync) -> State:
    """Runs all buckets through the manager's staging memory; a mapping of its own reads it, as in the engine."""
    plan, source = sync.plan, sync.source
    reader = Reader(plan, source, manager.sender)
    assert reader.staging_bytes <= STAGING_BUCKETS * manager._bucket_bytes
    assembler = Assembler(frozenset(entry.name for bucket in plan.buckets for entry in bucket.entries))
    got: State = {}
    for index, bucket in enumerate(plan.buckets):
        manager.agreement.run(f"packing bucket {index}", source.prepare(bucket.bases))
        manager.agreement.settle(f"packing bucket {index}")
        memory = reader.receive(index, sync.shards)
        for name, tensor in assembler.tensors(memory, bucket.entries):
            assert name not in got, f"{name} came twice"
            got[name] = tensor.clone()
    assembler.finish()
    reader.check()
    return got


def check_same(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    odd = {name: (got[name].dtype, t.dtype) for name, t in expected.items() if got[name].dtype != t.dtype}
    assert not odd, odd
    different = [n for n, t in expected.items() if got[n].shape != t.shape or not torch.equal(got[n], t)]
    assert not different, different


def on_disk(folder: str) -> State:
    found: State = {}
    for file in Path(folder).glob("*.safetensors"):
        found.update(load_file(file))
    return found


def on_the_wire(state: State, wire: torch.dtype) -> State:
    """What must arrive as long as no engine has said in which dtypes it keeps them: never wider than the trainer has
    it, and the router's bias, a buffer, as it is."""
    return {
        name: tensor if name.endswith("bias") and "gate" in name else tensor.to(min(wire, tensor.dtype, key=_size))
        for name, tensor in state.items()
    }


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def syncs(model_path: str, layout: Layout, wire: str = "bfloat16") -> list[str]:
    """Three syncs with two bucket sizes each and a training step in between; returns the plans' digests."""
    engine = build(model_path, layout)
    managers = [
        manager_of(engine, size, wire, how) for size, how in ((TINY, "staged"), (LARGE, "auto"), (TINY, "auto"))
    ]
    disk, digests = on_disk(model_path), []
    # The checkpoint is all in bfloat16; the router's biases become float32
    expected = {n: t.float() if n.endswith("_bias") and "gate" in n else t for n, t in disk.items()}
    for step in range(SYNCS):
        if step:
            train_step(engine)
            last, expected = expected, stock_export(engine)
            same = [name for name, tensor in expected.items() if torch.equal(tensor, last[name])]
            assert not same, f"training must have changed everything: {same}"
        for manager in managers:
            check_same(one_sync(manager), on_the_wire(expected, getattr(torch, wire)))
            assert isinstance(manager.source, MegatronSource), "the bridge's own stream was used"
            digests.append(manager.agreed_digest)
    return digests


def device_bytes(engine: Any) -> int:
    """What Megatron's parameter buffers occupy on the device."""
    return sum(b.param_data.untyped_storage().size() for chunk in engine.module for b in chunk.buffers)


def offloaded(model_path: str, layout: Layout) -> None:
    """Parameters are in host memory while they are sent, and are not brought to the device for it."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    engine = build(model_path, layout)
    manager = manager_of(engine, LARGE)
    for step in range(SYNCS):
        load_megatron_model_to_gpu(engine.module)
        if step:
            train_step(engine)
        expected = stock_export(engine)
        assert device_bytes(engine) > 100_000
        offload_megatron_model_to_cpu(engine.module)
        got = one_sync(manager)
        assert device_bytes(engine) == 0, "the sync loaded the parameters"
        check_same(got, expected)


def padded(model_path: str, layout: Layout) -> int:
    """Megatron pads the vocabulary, and what arrives is the checkpoint; returns the rows it has padded."""
    engine = build(model_path, layout, should_pad_vocab=True, make_vocab_size_divisible_by=128)
    disk = on_disk(model_path)
    for size in (TINY, LARGE):
        check_same(one_sync(manager_of(engine, size)), disk)
    rows = unwrapped(engine.module[0]).embedding.word_embeddings.weight.shape[0] * layout.tp
    return int(rows) - len(disk["model.embed_tokens.weight"])


def refused(model_path: str) -> list[str]:
    """The errors of an engine set up in ways that cannot be synced; then it is set up well and synced."""
    engine = build(model_path, Layout(dist.get_world_size(), tp=2))
    broken = [
        mock.patch.object(engine.module[0].ddp_config, "overlap_param_gather", True),
        mock.patch.object(engine, "engine_config", replace(engine.engine_config, use_megatron_fsdp=True)),
        mock.patch.object(engine, "_qat_enabled", True),
        mock.patch.object(engine, "vanilla_bridge", True),
    ]
    manager, texts = manager_of(engine, LARGE), []
    for context in broken:
        with context:
            try:
                one_sync(manager)
            except SyncError as error:
                texts.append(str(error))
    check_same(one_sync(manager), on_disk(model_path))
    return texts


def disagreeing(model_path: str, layout: Layout, change: str) -> tuple[str, float]:
    """The last rank holds a parameter differently in the second sync and as before in the third: (error, seconds)."""
    engine = build(model_path, layout)
    manager = manager_of(engine, LARGE)
    one_sync(manager)
    odd = dist.get_rank() == dist.get_world_size() - 1
    module = unwrapped(engine.module[0]).decoder.layers[0].self_attention.linear_proj
    honest = module.weight
    if odd:
        module._parameters.pop("weight")
        if change != "gone":
            shape = (honest.shape[0] + 1, *honest.shape[1:]) if change == "shape" else honest.shape
            dtype = torch.float32 if change == "dtype" else honest.dtype
            module.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            for name in ("tensor_model_parallel", "partition_dim"):
                setattr(module.weight, name, getattr(honest, name))
    started, text = time.monotonic(), ""
    try:
        one_sync(manager)
    except SyncError as error:
        text = str(error)
    seconds = time.monotonic() - started
    module.weight = honest
    train_step(engine)
    check_same(one_sync(manager), stock_export(engine))
    return text, seconds
