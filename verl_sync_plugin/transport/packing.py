"""Fills this rank's segment of a bucket: by one launch of the copy kernel where it can, hashing what is packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_sync_plugin.bucket import Bucket, Plan, Slice
from verl_sync_plugin.copies.blocks import Block, Interval, union, within
from verl_sync_plugin.copies.plain import hash_bytes
from verl_sync_plugin.copies.table import KernelTable, addresses, kernel_works
from verl_sync_plugin.source.base import Shard

# Elements that are moved to the device or merged at a time; in fp32 a whole bucket of them would take twice its size
MERGE_CHUNK = 1 << 24
# How a shard is packed: by the kernel as it is, by the kernel cast from fp32 to bf16, one by one
AS_IS, CAST, ALONE = range(3)


def covered(bucket: Bucket, rank: int) -> list[Interval]:
    """The bytes of a rank's segment that belong to any tensor, as offsets in the bucket: what is hashed."""
    spans = (span for entry in bucket.entries for piece in entry.pieces for span in piece.spans())
    return within(union(spans), rank * bucket.stride, (rank + 1) * bucket.stride)


class Packer:
    """Keeps tables from sync to sync; an offloaded shard comes back elsewhere, which costs new addresses only.

    Args:
        device: where the slots are.
        plan: all buckets.
        hashed: whether to hash what is packed.
    """

    def __init__(self, device: torch.device, plan: Plan, hashed: bool) -> None:
        self.plan = plan
        self.hashed = hashed
        self._device = device
        self._numbers = {id(bucket): number for number, bucket in enumerate(plan.buckets)}
        self._kernel = kernel_works(device)
        self._sums = torch.zeros(len(plan.buckets), dtype=torch.int64, device=device)
        self._tables: dict[int, _Table] = {}

    def begin(self) -> None:
        """Once per sync, before the first bucket."""
        self._sums.zero_()

    def pack(self, bucket: Bucket, memory: torch.Tensor, shards: list[Shard], rank: int) -> None:
        """Copies this rank's runs into its segment, cast to the wire dtype; copies may still run when it returns.

        Args:
            bucket: one of the plan's.
            memory: its slot, uint8.
            shards: all shards of this rank, by base index.
            rank: this rank's segment.
        """
        number = self._numbers[id(bucket)]
        if not self._kernel:
            pack_segment(memory, bucket, shards, rank)
            if self.hashed:
                for low, high in covered(bucket, rank):
                    self._sums[number] += hash_bytes(memory[low:high], low)
            return
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = _Table(self.plan, bucket, rank, number, self._device)
        table.find(shards, hash_alone=self.hashed)
        segment = memory.narrow(0, rank * bucket.stride, bucket.stride)
        for part in table.alone:
            pack_slice(segment, part, shards[part.base])
        table.run(memory, self._sums, self.hashed)

    def sums(self) -> list[int]:
        """The hash of this rank's segment of every bucket. Waits for the device."""
        return [int(value) for value in self._sums.tolist()]


class _Table:
    """One bucket on a device with the kernel. ``alone``: slices to be packed one by one before ``run``."""

    def __init__(self, plan: Plan, bucket: Bucket, rank: int, number: int, device: torch.device) -> None:
        self._plan, self._bucket, self._rank, self._number, self._device = plan, bucket, rank, number, device
        self._bases = list(dict.fromkeys(part.base for part in bucket.slices))
        self._found: list[tuple[int, torch.dtype]] = []
        self._kinds: dict[int, int] = {}
        self._copied: set[int] = set()  # bases whose ``local`` makes a copy
        self._lasting: set[int] = set()  # and those whose does not
        self._addresses: dict[int, torch.Tensor] = {}
        self._table: KernelTable | None = None
        self.alone: list[Slice] = []

    def find(self, shards: list[Shard], hash_alone: bool) -> None:
        """Looks up where the bucket's shards are now."""
        runs = {base: self._run(base, shards[base]) for base in self._bases}
        found = [(0, torch.uint8) if run is None else (run.data_ptr(), run.dtype) for run in runs.values()]
        if found == self._found:
            return
        self._found, self._addresses = found, {}
        kinds = {base: self._kind(shards[base], run) for base, run in runs.items()}
        if kinds != self._kinds:
            self._kinds = kinds
            self.alone = [part for part in self._bucket.slices if kinds[part.base] == ALONE]
            self._table = KernelTable(self._blocks(hash_alone), self._device)

    def _run(self, base: int, shard: Shard) -> torch.Tensor | None:
        """The live memory of a shard; ``None`` when it is merged, or handed out as a copy, gone when we look away."""
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

    def run(self, memory: torch.Tensor, sums: torch.Tensor, hashed: bool) -> None:
        """Starts the copies into the slot."""
        slot = memory.data_ptr()
        if slot not in self._addresses:
            self._addresses[slot] = addresses(slot, [*(address for address, _ in self._found), slot], self._device)
        assert self._table is not None, "find() comes first"
        self._table.run(self._addresses[slot], sums, hashed=hashed)

    def _blocks(self, hash_alone: bool) -> Iterator[Block]:
        """Only bytes that belong to a tensor are packed. What was packed alone is copied onto itself, to be hashed."""
        intervals = covered(self._bucket, self._rank)
        places = {base: place for place, base in enumerate(self._bases)}
        low = 0
        for part in self._bucket.slices:
            base, kind = self._plan.bases[part.base], self._kinds[part.base]
            count = min(part.end, base.lengths[self._rank if len(base.lengths) > 1 else 0]) - part.begin
            if count <= 0 or (kind == ALONE and not hash_alone):
                continue
            start = self._rank * self._bucket.stride + part.offset
            while low < len(intervals) and intervals[low][1] <= start:
                low += 1
            grow = 2 if kind == CAST else 1
            for first, end in within_from(intervals, low, start, start + count * base.itemsize):
                if kind == ALONE:
                    yield Block(first, first, first, end - first, base=len(self._bases), group=self._number)
                else:
                    source = (part.begin * base.itemsize + first - start) * grow
                    place = places[part.base]
                    yield Block(source, first, first, end - first, base=place, group=self._number, grow=grow)


def within_from(intervals: list[Interval], index: int, low: int, high: int) -> Iterator[Interval]:
    """Like ``within``, from a known first interval on: slices and intervals both ascend."""
    while index < len(intervals) and intervals[index][0] < high:
        first, end = intervals[index]
        if end > low:
            yield max(first, low), min(end, high)
        index += 1


def pack_slice(segment: torch.Tensor, part: Slice, shard: Shard) -> None:
    """Copies one slice of one shard into a segment (uint8), cast and merged on the way."""
    run = shard.local()[part.begin : part.end]
    if run.numel() == 0:  # also what another rank owns
        return
    target = segment.narrow(0, part.offset, run.numel() * shard.base.itemsize).view(getattr(torch, shard.base.dtype))
    if shard.merge is None and run.device == target.device:
        target.copy_(run)
        return
    for done in range(0, run.numel(), MERGE_CHUNK):
        # Move, then cast: a casting copy across devices would cast on the host
        chunk = run[done : done + MERGE_CHUNK].to(target.device, non_blocking=True)
        if shard.merge is not None:
            chunk = shard.merge(chunk, part.begin + done)
        target[done : done + MERGE_CHUNK].copy_(chunk)


def pack_segment(memory: torch.Tensor, bucket: Bucket, shards: list[Shard], rank: int) -> None:
    """Fills segment ``rank`` of a bucket, one slice after another.

    Args:
        memory: uint8, at least ``bucket.nbytes`` long.
        bucket: what goes where.
        shards: all shards of this rank, by base index.
        rank: this rank's place in the group.
    """
    segment = memory.narrow(0, rank * bucket.stride, bucket.stride)
    for part in bucket.slices:
        pack_slice(segment, part, shards[part.base])
