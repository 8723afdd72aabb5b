# SPDX-License-Identifier: Apache-2.0
"""Whole syncs as an engine rank sees them: through mappings of its own of the trainer ranks' slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.copies.plain import hash_bytes
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard, hulls_of, numbers_of
from verl_sync_plugin.sync.sender import SLOTS, BucketSender
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.memory import open_peer_staging, slot_of
from verl_sync_plugin.verify import times_sent

CPU = torch.device("cpu")
TINY, LARGE = 6_001, 64 << 20  # bytes of a bucket; TINY is no multiple of anything
WAYS = ((TINY, False), (LARGE, False), (TINY, True))  # sizes, and whether all ranks share out every bucket
State = dict[str, torch.Tensor]


def planned(source: ParameterSource, bucket_bytes: int, sharded: bool = False) -> tuple[Plan, list[Shard]]:
    shards = source.shards()
    return plan_buckets(tuple(shard.base for shard in shards), bucket_bytes, sharded), shards


def deliver(
    source: ParameterSource,
    plan: Plan,
    shards: list[Shard],
    kept: BucketSender | None = None,
    prepare: Callable[[int, Iterator[None]], None] = lambda index, work: list(work) and None,
) -> State:
    """One sync, as the manager runs it and as the engine rank next to this trainer rank reads it; collective over the
    source's group. Every tensor comes once. ``prepare`` runs what comes before each bucket."""
    sender, group = kept or BucketSender(CPU, 30.0), source.group
    rank = 0 if group is None else dist.get_rank(group)
    sender.reserve(plan)
    sender.begin(plan, rank)
    exports: list[Any] = [sender.export()]
    if plan.sharded:
        exports = [None] * dist.get_world_size(group)
        dist.all_gather_object(exports, sender.export(), group=group)
    mapped = [open_peer_staging(export, CPU) for export in exports]
    meet = partial(dist.barrier, group) if plan.sharded else lambda: None
    assembler, got = Assembler(frozenset(plan.names)), State()
    numbers = numbers_of(bucket.entries for bucket in plan.buckets)
    read = torch.zeros(len(numbers), dtype=torch.int64)
    for index, bucket in enumerate(plan.buckets):
        slot = index % SLOTS
        prepare(index, source.prepare(bucket.bases, [later.bases for later in plan.buckets[index + 1 :]]))
        meet()  # everyone has read what was there, and it is packed over rubbish
        sender._slot(slot).fill_(0xEE)
        sender.pack(index, slot, shards)
        if not plan.sharded and bucket.world > 1:
            start = partial(dist.broadcast, group=group, async_op=True)
            sender.broadcast(bucket, slot, dist.get_process_group_ranks(group), start)
            sender.drain(slot)
        meet()
        sources = mapped if plan.sharded and bucket.world > 1 else [mapped[rank if plan.sharded else 0]]
        slots = [slot_of(each, slot, exports[0].slot_bytes) for each in sources]
        memory = BucketMemory(slots, bucket.stride, bucket.world)
        for hull in hulls_of(bucket.entries):
            part = memory.narrow(hull.first, hull.end - hull.first)
            read[numbers[hull.names[0]]] += hash_bytes(part, hull.first)
        for name, tensor in assembler.tensors(memory, bucket.entries):
            assert name not in got, f"{name} came twice"
            got[name] = tensor.clone()
    assembler.finish()
    agreement, world = Agreement(30.0), dist.get_world_size()
    both = torch.stack([sender.sums(plan), read])
    sent, heard = agreement.vote("comparing", both).reshape(both.shape)
    assert torch.equal(sent * world, heard * times_sent(plan, world)), "bytes changed on the way"
    meet()
    if kept is None:
        sender.close()
    return got


def within_one_ulp(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Where weight and delta cancel, the rounding of the fp32 product shows; it depends on how many rows are
    multiplied."""
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf, dtype=expected.dtype)) - expected.abs()
    return got.dtype == expected.dtype and bool(((got - expected).abs() <= ulp.clamp(min=4e-6)).all())


def check_same(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    odd = {name: (got[name].dtype, t.dtype) for name, t in expected.items() if got[name].dtype != t.dtype}
    assert not odd, odd
    different = [n for n, t in expected.items() if got[n].shape != t.shape or not torch.equal(got[n], t)]
    assert not different, different
