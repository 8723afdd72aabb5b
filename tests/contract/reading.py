"""Reads buckets the way an engine rank does: through mappings of its own of the trainer ranks' slots."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Plan
from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.source.base import ParameterSource, Shard
from verl_sync_plugin.transport.sender import SLOTS, BucketSender
from verl_sync_plugin.transport.staging import open_peer_staging, slot_of

CPU = torch.device("cpu")


class Reader:
    """What the engine rank beside this trainer rank sees. Collective over the group where the plan is sharded."""

    def __init__(self, plan: Plan, source: ParameterSource, sender: BucketSender) -> None:
        sender.reserve(plan)
        sender.begin(plan, hashed=True)
        self.plan, self.sender, self.group = plan, sender, source.group
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        exports = [sender.export()]
        if plan.sharded:
            exports = [None] * dist.get_world_size(self.group)  # type: ignore[list-item]
            dist.all_gather_object(exports, sender.export(), group=self.group)
        self.staging_bytes = exports[0].nbytes
        self._slot_bytes = exports[0].slot_bytes
        self._memories = [open_peer_staging(export, CPU) for export in exports]
        self._meet()

    def _meet(self) -> None:
        if self.plan.sharded:
            dist.barrier(self.group)

    def receive(self, index: int, shards: list[Shard]) -> BucketMemory:
        """Packs one bucket over rubbish and brings it here; all ranks have packed it when this returns."""
        bucket, slot = self.plan.buckets[index], index % SLOTS
        self._meet()  # everyone has read what was there
        self.sender._slot(slot).fill_(0xEE)
        self.sender.pack(bucket, slot, shards, self.rank if bucket.world > 1 else 0)
        if not self.plan.sharded:
            self.sender.gather(bucket, slot, self.rank, self.group)
        self._meet()
        spread = self.plan.sharded and bucket.world > 1
        own = self.rank if self.plan.sharded else 0
        memories = self._memories if spread else self._memories[own : own + 1]
        return BucketMemory([slot_of(m, slot, self._slot_bytes) for m in memories], bucket.stride, bucket.world)

    def close(self) -> None:
        self._meet()
        self._memories = []
        self.sender.close()
