# SPDX-License-Identifier: Apache-2.0
"""A rank fails on its way to a collective of the preparation: one error everywhere, soon, and the next sync works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lora_models import CPU, Layout, Variant, deliver, merging_source, peft_model, shard
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import Reach, Staged, Sync
from verl_sync_plugin.trainers.lora import MergingSource
from verl_sync_plugin.transport.agreement import Agreement

DORA = Variant("dora", config={"target_modules": "all-linear", "use_dora": True})
BUCKET = 64 << 10
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SOON = 5.0


def out_of_memory() -> Any:
    raise torch.OutOfMemoryError("injected: out of memory")


def break_factor(source: MergingSource) -> None:
    """What is gathered first cannot be packed."""
    source.factors.shards[FACTOR] = replace(source.factors.shards[FACTOR], local=out_of_memory)


def break_weight(source: MergingSource) -> None:
    """The factors are there; the squares of DoRA's rows, to be summed over all ranks, cannot be had."""
    place = next(i for i, (part, _) in enumerate(source.exported) if any(m.name == WEIGHT for m in part.members))
    part, targets = source.exported[place]
    source.exported[place] = replace(part, local=out_of_memory), targets


BREAKS: dict[str, Callable[[MergingSource], None]] = {"factors": break_factor, "norms": break_weight}


def first_buckets(
    source: MergingSource, plan: Plan, shards: list[Shard], agreement: Agreement, sender: BucketSender
) -> None:
    sender.reserve(plan)
    way = Staged(SyncConfig(), agreement, sender, agreement, Reach(agreement))
    way.fill(Sync("1", plan, source, shards, SyncReport(), (), ()))
    agreement.settle(f"packing bucket 1 of {len(plan.buckets)}")


def fail_on_the_last_rank(layout: Layout, where: str) -> tuple[str, float]:
    source = merging_source(shard(peft_model(DORA), layout), DORA.model)
    agreement, sender = Agreement(20.0), BucketSender(CPU, 20.0)
    honest = deliver(source, BUCKET)
    shards = source.shards()
    plan = plan_buckets(tuple(part.base for part in shards), BUCKET)
    if dist.get_rank() == dist.get_world_size() - 1:
        BREAKS[where](source)
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        first_buckets(source, plan, shards, agreement, sender)
    seconds = time.monotonic() - started
    source.release()
    first_buckets(source, plan, source.shards(), agreement, sender)
    sender.close()
    again = deliver(source, BUCKET)
    assert all(torch.equal(honest[name], again[name]) for name in honest), "the next sync shipped something else"
    return str(caught.value), seconds


@pytest.mark.parametrize("where", sorted(BREAKS))
@pytest.mark.parametrize("layout", [Layout((3,)), Layout((2, 2)), Layout((2,), True)], ids=str)
def test_nobody_is_left_alone_in_a_collective(layout: Layout, where: str) -> None:
    results = run_world(layout.size, fail_on_the_last_rank, layout, where, timeout=40)
    (text,) = {text for text, _ in results}
    assert f"rank {layout.size - 1}: torch.OutOfMemoryError: injected" in text, text
    assert text.count("rank ") == 1 and "failed at 'packing bucket " in text, text
    assert max(seconds for _, seconds in results) < SOON
