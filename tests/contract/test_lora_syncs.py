# SPDX-License-Identifier: Apache-2.0
"""LoRA over many syncs: the trainer stays as it is, what is gathered ahead is bounded, and nothing of it goes stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lora_models import BrokenOffError, Layout, Variant, assert_unchanged, deliver, merging_source, peft_model, shard
from worlds import run_world

from contract.fsdp_layouts import torchs_own_state
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.lora.peft import is_adapter

LINEAR = Variant("all-linear", config={"target_modules": "all-linear"})
DORA = Variant("dora-embedding", "llama", {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True})


def sync_often(layout: Layout, syncs: int) -> None:
    variant = DORA
    module = shard(peft_model(variant), layout)
    source = merging_source(module, variant.model)
    before = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
    first = deliver(source, 9_001)
    for _ in range(syncs - 1):
        again = deliver(source, 9_001)
    with pytest.raises(BrokenOffError):
        deliver(source, 9_001, break_off_after=7)
    assert_unchanged(before, module)
    again = deliver(source, 9_001)
    assert all(torch.equal(first[name], again[name]) for name in first), "a later sync shipped something else"
    assert_unchanged(before, module)


def count_collectives(layout: Layout, gather_bytes: int) -> tuple[list[int], list[int]]:
    """What each bucket's preparation yields before, and the bytes of factors that are there behind it."""
    source = merging_source(shard(peft_model(LINEAR), layout), LINEAR.model, gather_bytes=gather_bytes)
    plan = plan_buckets(tuple(part.base for part in source.shards()), 30_001)
    bases = [bucket.bases for bucket in plan.buckets]
    counts, held = [], []
    for index, each in enumerate(bases):
        counts.append(sum(1 for _ in source.prepare(each, bases[index + 1 :])))
        assert {key for key, _ in source.merged_with(each)} <= source.gathered.keys()
        held.append(sum(factor.nbytes for factor in source.gathered.values()))
    source.release()
    assert not source.gathered
    return counts, held


@pytest.mark.parametrize("layout", [Layout((3,)), Layout((2, 2))], ids=str)
def test_the_factors_of_several_buckets_are_gathered_at_once_within_bounds(layout: Layout) -> None:
    (alone, smallest), *_ = run_world(layout.size, count_collectives, layout, 0)
    bound = 2 * max(smallest)
    for counts, held in run_world(layout.size, count_collectives, layout, bound):
        assert max(counts) == 1 and 1 < sum(counts) <= sum(alone) * 2 // 3, (counts, alone)
        assert max(held) <= bound
    for counts, _ in run_world(layout.size, count_collectives, layout, 1 << 30):
        assert counts == [1] + [0] * (len(counts) - 1)


def change_between_syncs(layout: Layout) -> None:
    module = shard(peft_model(LINEAR), layout)
    source = merging_source(module, LINEAR.model, gather_bytes=1 << 30)
    with pytest.raises(BrokenOffError):
        deliver(source, 30_001, break_off_after=2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                parameter.mul_(1.25)
    fresh = deliver(merging_source(module, LINEAR.model), 30_001)
    for _ in range(2):
        got = deliver(source, 30_001)
        assert all(torch.equal(got[name], fresh[name]) for name in fresh), "factors of the sync before"


def test_what_was_gathered_ahead_of_a_failure_is_not_used_later() -> None:
    run_world(2, change_between_syncs, Layout((2,)))


def offload_between_syncs(layout: Layout, merge: bool) -> None:
    """verl replaces every parameter by a copy elsewhere when it offloads: the old one must be free to go."""
    module = shard(peft_model(LINEAR), layout)
    source = merging_source(module, "qwen2", merge)
    deliver(source, 64 << 20)
    source.release()
    held = [weakref.ref(parameter._local_tensor.untyped_storage()) for parameter in module.parameters()]  # type: ignore[attr-defined]
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    gc.collect()
    alive = sum(reference() is not None for reference in held)
    assert not alive, f"{alive} of {len(held)} parameters are still held after the sync"


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
def test_nothing_of_the_trainer_is_held_between_syncs(merge: bool) -> None:
    run_world(2, offload_between_syncs, Layout((2,)), merge)


@pytest.mark.parametrize(
    "layout", [Layout((2,)), pytest.param(Layout((2,), True), marks=pytest.mark.extended)], ids=str
)
def test_a_hundred_merges_and_a_failure_leave_the_trainer_bit_identical(layout: Layout) -> None:
    run_world(layout.size, sync_often, layout, 100)
