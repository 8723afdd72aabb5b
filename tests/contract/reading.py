# SPDX-License-Identifier: Apache-2.0
"""Whole syncs as an engine rank sees them: through mappings of its own of the trainer ranks' slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

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


class Reader:
    """Reads as the engine rank next to this trainer rank. All ranks of a sharded plan's group call it together."""

    def __init__(self, plan: Plan, source: ParameterSource, sender: BucketSender) -> None:
        sender.reserve(plan)
        self.plan, self.sender, self.group = plan, sender, source.group
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        sender.begin(plan, self.rank)
        exports = [sender.export()]
        if plan.sharded:
            exports = [None] * dist.get_world_size(self.group)  # type: ignore[list-item]
            dist.all_gather_object(exports, sender.export(), group=self.group)
        self.staging_bytes = exports[0].nbytes
        self._slot_bytes = exports[0].slot_bytes
        self._memories = [open_peer_staging(export, CPU) for export in exports]
        self._numbers = numbers_of(bucket.entries for bucket in plan.buckets)
        self._read = torch.zeros(len(self._numbers), dtype=torch.int64)
        self._meet()

    def _meet(self) -> None:
        if self.plan.sharded:
            dist.barrier(self.group)

    def receive(self, index: int, shards: list[Shard]) -> BucketMemory:
        """Packs one bucket over rubbish and brings it here; all ranks have packed it when this returns."""
        bucket, slot = self.plan.buckets[index], index % SLOTS
        self._meet()  # everyone has read what was there
        self.sender._slot(slot).fill_(0xEE)
        self.sender.pack(index, slot, shards)
        if not self.plan.sharded and bucket.world > 1:
            start = partial(dist.broadcast, group=self.group, async_op=True)
            self.sender.broadcast(bucket, slot, dist.get_process_group_ranks(self.group), start)
            self.sender.drain(slot)
        self._meet()
        spread = self.plan.sharded and bucket.world > 1
        own = self.rank if self.plan.sharded else 0
        memories = self._memories if spread else self._memories[own : own + 1]
        memory = BucketMemory([slot_of(m, slot, self._slot_bytes) for m in memories], bucket.stride, bucket.world)
        for hull in hulls_of(bucket.entries):
            self._read[self._numbers[hull.names[0]]] += hash_bytes(
                memory.narrow(hull.first, hull.end - hull.first), hull.first
            )
        return memory

    def check(self) -> None:
        """Compares hashes as a sync does; every rank has read everything. Collective over all trainer ranks."""
        agreement, world = Agreement(30.0), dist.get_world_size()
        both = torch.stack([self.sender.sums(self.plan), self._read])
        sent, read = agreement.vote("comparing", both).reshape(both.shape)
        assert torch.equal(sent * world, read * times_sent(self.plan, world)), "bytes changed on the way"

    def close(self) -> None:
        self._meet()
        self._memories = []
        self.sender.close()


def planned(source: ParameterSource, bucket_bytes: int, sharded: bool = False) -> tuple[Plan, list[Shard]]:
    shards = source.shards()
    return plan_buckets(tuple(shard.base for shard in shards), bucket_bytes, sharded), shards


def deliver(
    source: ParameterSource,
    plan: Plan,
    shards: list[Shard],
    sender: BucketSender | None = None,
    prepare: Callable[[int, Iterator[None]], None] = lambda index, work: list(work) and None,
) -> State:
    """One sync, as the manager runs it; every tensor comes once. ``prepare`` runs what comes before each bucket."""
    reader = Reader(plan, source, sender or BucketSender(CPU, 30.0))
    assembler, got = Assembler(frozenset(plan.names)), State()
    for index, bucket in enumerate(plan.buckets):
        prepare(index, source.prepare(bucket.bases, [later.bases for later in plan.buckets[index + 1 :]]))
        memory = reader.receive(index, shards)
        for name, tensor in assembler.tensors(memory, bucket.entries):
            assert name not in got, f"{name} came twice"
            got[name] = tensor.clone()
    assembler.finish()
    reader.check()
    if sender is None:
        reader.close()
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
