# SPDX-License-Identifier: Apache-2.0
"""A trainer rank's parameters, told to the engine ranks that read them where they lie: nothing is staged or packed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import torch

from verl_sync_plugin.copies.pack_table import ALONE, CAST, Found, segment_of
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Bucket, Plan
from verl_sync_plugin.transport.memory.exports import Live, Region
from verl_sync_plugin.transport.memory.regions import exporter_for

Place = tuple[int, int]  # allocation, first byte in it


class NotInPlaceError(RuntimeError):
    """A parameter cannot be read where it lies; the text says which and why."""


class LiveParameters:
    """One trainer rank's account of where its parameters lie, told once and kept while everything stays where it is.

    Args:
        device: where the trainer computes.
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.

    Attributes:
        found: where the parameters are.
    """

    def __init__(self, device: torch.device, plan: Plan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self._device = device
        held = [part for each in plan.buckets for part in each.slices if part.count(plan.bases[part.base], rank) > 0]
        self.found = Found(list(dict.fromkeys(part.base for part in held)), device)
        self._exporter = exporter_for(device)
        self._identities: object = None
        self._allocations: tuple[int, ...] = ()
        self._live: Live | None = None

    def look(self, shards: Sequence[Shard]) -> Live:
        """Looks where all parameters of the plan are now.

        Raises:
            NotInPlaceError: a parameter is merged, on the host, of a dtype that has to be cast otherwise than from fp32
                to bf16, or in memory that cannot be shared.
        """
        moved = self.found.look(shards)
        if not moved and self._live is not None and self._same():
            return self._live
        self._live = None
        for base, kind in self.found.kinds.items():
            if kind == ALONE:
                raise NotInPlaceError(f"{shards[base].base.key!r} {_why(shards[base], self._device)}")
        self._live = self._tell(shards)
        return self._live

    def _same(self) -> bool:
        try:
            return self._exporter.identities(self._allocations) == self._identities
        except RuntimeError:
            return False

    def _tell(self, shards: Sequence[Shard]) -> Live:
        places: dict[int, Place] = {}
        for base in self.found.bases:
            run = self.found.run(base, shards[base])
            assert run is not None, "looked up before"
            try:
                places[base] = self._exporter.find(run)
            except RuntimeError as error:
                raise NotInPlaceError(f"{shards[base].base.key!r}: {error}") from error
        self._allocations = tuple(dict.fromkeys(allocation for allocation, _ in places.values()))
        try:
            regions: list[Region] = [self._exporter.export(allocation) for allocation in self._allocations]
            self._identities = self._exporter.identities(self._allocations)
        except RuntimeError as error:
            raise NotInPlaceError(f"memory of parameters cannot be shared: {error}") from error
        number = {allocation: index for index, allocation in enumerate(self._allocations)}
        runs = tuple(self._runs(bucket, places, number) for bucket in self.plan.buckets)
        return Live(uuid.uuid4().hex, tuple(regions), runs)

    def _runs(self, bucket: Bucket, places: dict[int, Place], number: dict[int, int]) -> bytes:
        rows = []
        for part in bucket.slices:
            base = self.plan.bases[part.base]
            count = part.count(base, self._rank)
            if count > 0:
                grow = 2 if self.found.kinds[part.base] == CAST else 1
                allocation, first = places[part.base]
                offset = segment_of(bucket, self._rank) * bucket.stride + part.offset
                source = first + part.begin * base.itemsize * grow
                rows.append((offset, count * base.itemsize, number[allocation], source, grow))
        return np.array(rows, dtype="<i8").reshape(-1, 5).tobytes()


def _why(shard: Shard, device: torch.device) -> str:
    if shard.merge is not None:
        return "is merged with its adapter on the way"
    run = shard.local()
    if run.device != device:
        return f"is on {run.device}, not on {device}"
    if run.dtype not in (getattr(torch, shard.base.dtype), torch.float32):
        return f"is {run.dtype} and travels as {shard.base.dtype}"
    return "is not laid out for it"
