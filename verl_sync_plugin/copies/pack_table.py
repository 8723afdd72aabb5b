# SPDX-License-Identifier: Apache-2.0
"""The memory of the shards of buckets, and the kernel's table that reads them from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.table import KernelTable, addresses
from verl_sync_plugin.layout.hulls import Hull, hulls_of
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.strided import Partition, Run
from verl_sync_plugin.layout.tensors import Bucket, Plan, Slice

# How a shard is read: by the kernel as it is, by the kernel cast from fp32 to bf16, by torch
AS_IS, CAST, ALONE = range(3)


class Found:
    """The places of the runs of some bases; an offloaded one comes back elsewhere.

    Attributes:
        kinds: how each base's run is read.
        places: for each base, the address of its run and its dtype; 0 of one that is merged or only handed out as a
            copy, gone when we look away.
        version: grows when any of this changes.
    """

    def __init__(self, bases: Sequence[int], device: torch.device) -> None:
        self.bases = tuple(bases)
        self.kinds: dict[int, int] = {}
        self.places: list[tuple[int, torch.dtype]] = []
        self.version = 0
        self._device = device
        self._copied: set[int] = set()  # bases whose ``local`` makes a copy
        self._lasting: set[int] = set()  # and those whose does not

    def look(self, shards: Sequence[Shard]) -> bool:
        """Looks the runs up; returns whether any is elsewhere, or of another dtype, than the last time."""
        places = [
            # with thousands of shards a call for each would take as long as moving them
            (run.data_ptr(), run.dtype) if (run := shards[base].run) is not None else self._place(base, shards[base])
            for base in self.bases
        ]
        if places == self.places:
            return False
        self.places = places
        self.version += 1
        self.kinds = {base: self._kind(shards[base], self.run(base, shards[base])) for base in self.bases}
        return True

    def _place(self, base: int, shard: Shard) -> tuple[int, torch.dtype]:
        run = self.run(base, shard)
        return (0, torch.uint8) if run is None else (run.data_ptr(), run.dtype)

    def run(self, base: int, shard: Shard) -> torch.Tensor | None:
        """The live memory of a shard; ``None`` where there is none to speak of."""
        if shard.merge is not None or base in self._copied:
            return None
        if shard.run is not None:
            return shard.run
        run = shard.local()
        if base not in self._lasting:
            if shard.local().data_ptr() != run.data_ptr():
                self._copied.add(base)
                return None
            self._lasting.add(base)
        return run

    def _kind(self, shard: Shard, run: torch.Tensor | None) -> int:
        if run is None or run.device != self._device or not run.is_contiguous() or run.data_ptr() % 16:
            return ALONE
        wire = getattr(torch, shard.base.dtype)
        if run.dtype == wire:
            return AS_IS
        return CAST if (run.dtype, wire) == (torch.float32, torch.bfloat16) else ALONE


class PackTable:
    """One bucket on a device with the kernel, or several that are only read. ``alone``: slices to be packed one by one
    before ``run``.

    Args:
        plan: all buckets.
        buckets: those of the table.
        rank: this rank's place among the owners of a sharded base.
        tensors: number of each tensor; see ``hulls.numbers_of``.
        device: where the slots are.
        read_alone: whether slices packed alone are to be read by ``run`` as well.
        found: of the buckets' bases, if somebody else looks; may leave out those of which this rank holds nothing.
    """

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[Bucket],
        rank: int,
        tensors: dict[str, int],
        device: torch.device,
        read_alone: bool,
        found: Found | None = None,
    ) -> None:
        self._plan, self._buckets, self._rank, self._device = plan, tuple(buckets), rank, device
        self._tensors, self._read_alone = tensors, read_alone
        self.found = found or Found(list(dict.fromkeys(part.base for each in buckets for part in each.slices)), device)
        self._version = -1
        self._kinds: dict[int, int] | None = None
        self._slot, self._addresses = -1, torch.empty(0)
        self._table: KernelTable | None = None
        self.alone: list[Slice] = []

    def find(self, shards: Sequence[Shard]) -> None:
        """Looks up where the shards are now. One that moved costs new addresses only, one of another kind a table."""
        self.found.look(shards)
        self.refresh()

    def refresh(self) -> None:
        """After ``found`` has looked."""
        if self._version == self.found.version:
            return
        self._version = self.found.version
        self._slot = -1
        if self.found.kinds != self._kinds:
            self._kinds = kinds = self.found.kinds
            self.alone = [p for bucket in self._buckets for p in bucket.slices if kinds.get(p.base) == ALONE]
            blocks = [block for bucket in self._buckets for block in self._blocks(bucket)]
            self._table = KernelTable(blocks, self._device)

    def run(self, slot: int, sums: torch.Tensor, hashed: bool, flags: torch.Tensor | None, copy: bool = True) -> None:
        """Starts the copies into a slot, or only reads.

        Args:
            slot: the address at which byte 0 of the bucket would lie.
            sums: gets the hashes; see ``KernelTable.run``, as for the others.
        """
        if slot != self._slot:  # a bucket has the same slot in every sync
            sources = [*(address for address, _ in self.found.places), slot]
            self._slot, self._addresses = slot, addresses(slot, sources, self._device)
        assert self._table is not None, "find() comes first"
        self._table.run(self._addresses, sums, copy, hashed, flags)

    def _blocks(self, bucket: Bucket) -> Iterator[Block]:
        """Only bytes that belong to a tensor are packed. What was packed alone is copied onto itself, to be read."""
        places = {base: place for place, base in enumerate(self.found.bases)}
        hulls = hulls_in_segment(bucket, self._rank)
        partition = Partition([Run(hull.first, hull.first, hull.end - hull.first) for hull in hulls])
        segment = segment_of(bucket, self._rank)
        for part in bucket.slices:
            base, kind = self._plan.bases[part.base], self.found.kinds.get(part.base)
            count = part.count(base, self._rank)
            if count <= 0 or (kind == ALONE and not self._read_alone):
                continue
            grow, dtype = 2 if kind == CAST else 1, base.dtype if "float" in base.dtype else ""
            size = base.itemsize
            run = Run(segment * bucket.stride + part.offset, part.begin * size, count * size)  # and where in the shard
            for index, found in partition.meet(run):
                at, group = found.source, self._tensors[hulls[index].names[0]]
                place, source = (len(places), at) if kind == ALONE else (places[part.base], found.target * grow)
                yield Block(source, at, at, found.width, base=place, group=group, grow=grow, dtype=dtype)


def segment_of(bucket: Bucket, rank: int) -> int:
    """A rank's segment of a bucket; there is only one of what every rank holds."""
    return rank if bucket.world > 1 else 0


def hulls_in_segment(bucket: Bucket, rank: int) -> list[Hull]:
    """The bytes of a rank's segment that belong to a tensor."""
    low = segment_of(bucket, rank) * bucket.stride
    return hulls_of(bucket.entries, low, low + bucket.stride)
