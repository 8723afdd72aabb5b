"""Fills this rank's segment of a bucket: by one launch of the copy kernel where it can, hashing what is packed.

A slot is uint8 and holds all of a bucket, or, where the plan is sharded, this rank's segment only; ``origin_of`` tells
at which byte of the bucket it begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_sync_plugin.bucket import Bucket, Plan, Slice
from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.hulls import Hull, hulls_of, numbers_of, within_segment
from verl_sync_plugin.copies.plain import hash_bytes
from verl_sync_plugin.copies.table import KernelTable, addresses, kernel_works
from verl_sync_plugin.source.base import Shard

# Elements that are moved to the device or merged at a time; in fp32 a whole bucket of them would take twice its size
MERGE_CHUNK = 1 << 24
# How a shard is packed: by the kernel as it is, by the kernel cast from fp32 to bf16, one by one
AS_IS, CAST, ALONE = range(3)


def origin_of(plan: Plan, bucket: Bucket, rank: int) -> int:
    """The byte of a bucket that a rank's slot begins with."""
    return rank * bucket.stride if plan.sharded else 0


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
        self._tensors = numbers_of(bucket.entries for bucket in plan.buckets)
        self._places = {id(bucket): place for place, bucket in enumerate(plan.buckets)}
        self._kernel = kernel_works(device)
        self._sums = torch.zeros(len(self._tensors), dtype=torch.int64, device=device)
        self._tables: dict[int, _Table] = {}

    def begin(self) -> None:
        """Once per sync, before the first bucket."""
        self._sums.zero_()

    def pack(self, bucket: Bucket, memory: torch.Tensor, shards: list[Shard], rank: int) -> None:
        """Copies this rank's runs into its segment, cast to the wire dtype; copies may still run when it returns.

        Args:
            bucket: one of the plan's.
            memory: its slot.
            shards: all shards of this rank, by base index.
            rank: this rank's segment.
        """
        origin = origin_of(self.plan, bucket, rank)
        if not self._kernel:
            pack_segment(memory, bucket, shards, rank, origin)
            if self.hashed:
                for hull in self._hulls(bucket, rank):
                    data = memory[hull.first - origin : hull.end - origin]
                    self._sums[self._tensors[hull.names[0]]] += hash_bytes(data, hull.first)
            return
        place = self._places[id(bucket)]
        table = self._tables.get(place)
        if table is None:
            hulls = self._hulls(bucket, rank)
            table = self._tables[place] = _Table(self.plan, bucket, rank, hulls, self._tensors, self._device)
        table.find(shards, hash_alone=self.hashed)
        segment = memory.narrow(0, rank * bucket.stride - origin, bucket.stride)
        for part in table.alone:
            pack_slice(segment, part, shards[part.base])
        table.run(memory.data_ptr() - origin, self._sums, self.hashed)

    def _hulls(self, bucket: Bucket, rank: int) -> list[Hull]:
        return within_segment(hulls_of(bucket.entries), rank * bucket.stride, (rank + 1) * bucket.stride)

    def sums(self) -> torch.Tensor:
        """The hash of what this rank packed of each tensor: int64 of shape ``(tensors,)``, numbered by ``numbers_of``,
        on the CPU. Waits for the device."""
        return self._sums.cpu()


class _Table:
    """One bucket on a device with the kernel. ``alone``: slices to be packed one by one before ``run``."""

    def __init__(
        self,
        plan: Plan,
        bucket: Bucket,
        rank: int,
        hulls: list[Hull],
        tensors: dict[str, int],
        device: torch.device,
    ) -> None:
        self._plan, self._bucket, self._rank, self._device = plan, bucket, rank, device
        self._hulls, self._tensors = hulls, tensors
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

    def run(self, slot: int, sums: torch.Tensor, hashed: bool) -> None:
        """Starts the copies into the slot; ``slot`` is the address at which byte 0 of the bucket would lie."""
        if slot not in self._addresses:
            self._addresses[slot] = addresses(slot, [*(address for address, _ in self._found), slot], self._device)
        assert self._table is not None, "find() comes first"
        self._table.run(self._addresses[slot], sums, hashed=hashed)

    def _blocks(self, hash_alone: bool) -> Iterator[Block]:
        """Only bytes that belong to a tensor are packed. What was packed alone is copied onto itself, to be hashed."""
        places = {base: place for place, base in enumerate(self._bases)}
        low = 0
        for part in self._bucket.slices:
            base, kind = self._plan.bases[part.base], self._kinds[part.base]
            count = min(part.end, base.lengths[self._rank if len(base.lengths) > 1 else 0]) - part.begin
            if count <= 0 or (kind == ALONE and not hash_alone):
                continue
            start = self._rank * self._bucket.stride + part.offset
            while low < len(self._hulls) and self._hulls[low].end <= start:
                low += 1
            grow = 2 if kind == CAST else 1
            for first, end, group in self._cut(low, start, start + count * base.itemsize):
                if kind == ALONE:
                    yield Block(first, first, first, end - first, base=len(self._bases), group=group)
                else:
                    source = (part.begin * base.itemsize + first - start) * grow
                    place = places[part.base]
                    yield Block(source, first, first, end - first, base=place, group=group, grow=grow)

    def _cut(self, index: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """The parts of hulls, from a known one on, that lie in ``[low, high)``, with the tensor's number."""
        while index < len(self._hulls) and self._hulls[index].first < high:
            hull = self._hulls[index]
            if hull.end > low:
                yield max(hull.first, low), min(hull.end, high), self._tensors[hull.names[0]]
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


def pack_segment(memory: torch.Tensor, bucket: Bucket, shards: list[Shard], rank: int, origin: int = 0) -> None:
    """Fills segment ``rank`` of a bucket, one slice after another.

    Args:
        memory: the slot.
        bucket: what goes where.
        shards: all shards of this rank, by base index.
        rank: this rank's place in the group.
        origin: the byte of the bucket that the slot begins with.
    """
    segment = memory.narrow(0, rank * bucket.stride - origin, bucket.stride)
    for part in bucket.slices:
        pack_slice(segment, part, shards[part.base])
