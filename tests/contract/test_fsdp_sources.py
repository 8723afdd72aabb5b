# SPDX-License-Identifier: Apache-2.0
"""FSDP and FSDP2 sources: what arrives at the engine is, bit for bit, what the model's own state dict holds.

Real models, real sharding, real gloo: source -> plan -> pack -> gather -> a second mapping of the slots -> assembler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import CONFIGS, build, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from worlds import run_world

from contract.fsdp_layouts import KEEP, LAYOUTS, Layout, State, open_source, shard, torchs_own_state
from contract.reading import Reader
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.naming import verl_rewrite

SYNCS = 3
TINY, LARGE = 6_001, 64 << 20  # bytes; TINY is no multiple of anything


def unit_of(name: str) -> str:
    """The FSDP unit that a parameter belongs to."""
    match = re.search(r"layers\.\d+", name)
    return match.group() if match else "root"


def expected_on_the_wire(state: State, parameters: set[str], layout: Layout, model_type: str) -> State:
    """The HF tensors that must arrive: bf16, except buffers and kept names (FSDP1: the whole unit of a kept name)."""
    kept = {name for name in parameters if any(re.search(pattern, name) for pattern in KEEP)}
    if layout.strategy:
        units = {unit_of(name) for name in kept}
        kept = {name for name in parameters if unit_of(name) in units}
    assert kept and parameters - kept, "the case must have both kinds"
    wire = {name: t.bfloat16() if name in parameters - kept else t for name, t in state.items()}
    return dict(verl_rewrite(model_type)(wire.items()))


def deliver(plan: Plan, shards: list[Shard], source: ParameterSource, sender: BucketSender) -> Iterator[State]:
    """Runs all buckets; yields what each load call would get."""
    reader = Reader(plan, source, sender)
    assembler = Assembler()
    for index, bucket in enumerate(plan.buckets):
        memory = reader.receive(index, shards)
        loaded: State = {}
        for name, tensor in assembler.tensors(memory, bucket.entries):
            assert name not in loaded, f"{name} came twice"
            loaded[name] = tensor.clone()
        yield loaded
    assembler.finish()
    reader.close()


def check_arrival(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name


def locals_of(shards: list[Shard]) -> list[torch.Tensor]:
    return [shard.local().clone() for shard in shards]


def one_sync(
    module: torch.nn.Module, source: ParameterSource, bucket_bytes: int, sharded: bool = False
) -> tuple[State, Plan]:
    """A sync and its checks on the sender: live parameters untouched, each name once."""
    shards = source.shards()
    before = locals_of(shards)
    versions = [parameter._version for parameter in module.parameters()]
    plan = plan_buckets(tuple(shard.base for shard in shards), bucket_bytes, sharded)
    assert plan.slot_bytes <= bucket_bytes
    got: State = {}
    for loaded in deliver(plan, shards, source, BucketSender(torch.device("cpu"), 30.0)):
        assert not got.keys() & loaded.keys(), "a name came twice"
        got.update(loaded)
    assert all(map(torch.equal, before, locals_of(source.shards()))), "the sync changed the trainer's parameters"
    assert versions == [parameter._version for parameter in module.parameters()], "the sync wrote to a parameter"
    return got, plan


def syncs(layout: Layout, model_name: str) -> list[str]:
    """Three syncs with two bucket sizes each and training in between; returns the plans' digests."""
    model_type = CONFIGS[model_name].model_type
    model = build(model_name)
    original: State = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    module = shard(model, layout)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.5)
    source = open_source(module, layout, model_type)
    digests, last = [], original
    for step in range(SYNCS):
        state = torchs_own_state(module)
        if step == 0:
            check_arrival(state, original)
        expected = expected_on_the_wire(state, parameters, layout, model_type)
        for bucket_bytes, sharded in ((TINY, False), (LARGE, False), (TINY, True)):
            got, plan = one_sync(module, source, bucket_bytes, sharded)
            check_arrival(got, expected)
            digests.append(plan.digest)
            if not sharded:
                check_cuts(plan, bucket_bytes)
        if step:
            unchanged = [name for name, tensor in state.items() if torch.equal(tensor, last[name])]
            assert unchanged == [], "training must have changed everything"
        last = state
        train_step(module, optimizer, step)
    assert "scratch" not in expected
    return digests


def check_cuts(plan: Plan, bucket_bytes: int) -> None:
    """The tiny buckets must tear tensors apart, the large one must not."""
    times: dict[str, int] = {}
    for bucket in plan.buckets:
        for entry in bucket.entries:
            times[entry.name] = times.get(entry.name, 0) + 1
    if bucket_bytes == TINY:
        assert max(times.values()) > 1
    else:
        assert max(times.values()) == 1
        assert len(plan.buckets) <= 2


def cases() -> Iterator[Any]:
    """Every model under every layout; ``make test`` runs experts and one other model, in turn, under each."""
    others = sorted(CONFIGS.keys() - {"qwen3_moe"})
    for number, layout in enumerate(LAYOUTS):
        for name in sorted(CONFIGS):
            runs = name in ("qwen3_moe", others[number % len(others)])
            yield pytest.param(layout, name, id=f"{layout}-{name}", marks=() if runs else pytest.mark.extended)


@pytest.mark.parametrize(("layout", "model_name"), list(cases()))
def test_every_tensor_arrives_bit_for_bit(layout: Layout, model_name: str) -> None:
    digests = run_world(layout.size, syncs, layout, model_name, timeout=180)
    assert all(of_rank == digests[0] for of_rank in digests), "the ranks planned differently"
    ways = digests[0][: len(digests[0]) // SYNCS]
    assert digests[0] == ways * SYNCS, "the plan must not change while the layout does not"
    assert len(set(ways)) == 3


def sync_untrained(layout: Layout) -> None:
    model = build("qwen2")
    original: State = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    module = shard(model, layout)
    got, _ = one_sync(module, open_source(module, layout, "qwen2"), LARGE)
    check_arrival(got, expected_on_the_wire(original, parameters, layout, "qwen2"))


@pytest.mark.parametrize(
    "layout", [Layout((2,)), Layout((2,), "FULL_SHARD"), Layout((2,), "FULL_SHARD", True)], ids=str
)
def test_sync_before_the_first_forward(layout: Layout) -> None:
    """verl syncs before the first step, when FSDP1 has not yet initialised itself lazily."""
    run_world(layout.size, sync_untrained, layout)


def sync_after_a_forward_that_raised() -> None:
    """The root stays gathered then; what is sent are the shards all the same."""
    layout = Layout((2,))
    model = build("qwen2")
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    module: Any = shard(model, layout)
    source = open_source(module, layout, "qwen2")
    expected = expected_on_the_wire(original, parameters, layout, "qwen2")
    _, plan = one_sync(module, source, LARGE)
    hook = module.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(input_ids=torch.arange(8).reshape(1, 8))
    hook.remove()
    assert not isinstance(module.model.embed_tokens.weight, DTensor), "the root is not gathered"
    got, again = one_sync(module, source, LARGE)
    check_arrival(got, expected)
    assert again.digest == plan.digest


def test_sync_after_a_forward_that_raised() -> None:
    run_world(2, sync_after_a_forward_that_raised)


def odd_placement() -> str:
    mesh = init_device_mesh("cpu", (2,))
    module = torch.nn.Linear(6, 6, bias=False)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: torch.distributed.tensor.Shard(1))
    source = FSDP2Source(module, WirePolicy(torch.bfloat16), verl_rewrite("qwen2"))
    try:
        source.shards()
    except ValueError as error:
        return str(error)
    return ""


def test_unknown_placement_is_refused_by_name() -> None:
    for text in run_world(2, odd_placement):
        assert "parameter 'weight' has placements (Shard(dim=1),)" in text
        assert "custom.sync.enabled=False to run stock verl" in text
