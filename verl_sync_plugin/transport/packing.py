"""Fills this rank's segment of a bucket: by one launch of the copy kernel where it can, hashing and checking what is
packed.

A slot is uint8 and holds all of a bucket, or, where the plan is sharded, this rank's segment only; ``Plan.origin``
tells at which byte of the bucket it begins.
"""

from __future__ import annotations

import torch

from verl_sync_plugin.bucket import Bucket, Plan, Slice
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.copies.plain import hash_bytes
from verl_sync_plugin.copies.table import kernel_works
from verl_sync_plugin.source.base import Shard
from verl_sync_plugin.transport.finite import FiniteCheck
from verl_sync_plugin.transport.pack_table import Found, PackTable, hulls_in_segment, segment_of

# Elements that are moved to the device or merged at a time; in fp32 a whole bucket of them would take twice its size
MERGE_CHUNK = 1 << 24


class Packer:
    """Keeps tables from sync to sync.

    Args:
        device: where the slots are.
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.
        hashed: whether to hash what is packed.
        finite: whether to look for NaN and Inf.
    """

    def __init__(self, device: torch.device, plan: Plan, rank: int, hashed: bool, finite: bool) -> None:
        self.plan, self.does = plan, (rank, hashed, finite)
        self._rank, self._hashed, self._finite = rank, hashed, finite
        self._device = device
        self._tensors = numbers_of(bucket.entries for bucket in plan.buckets)
        self._kernel = kernel_works(device)
        self._sums = torch.zeros(len(self._tensors), dtype=torch.int64, device=device)
        self._flags = torch.zeros(len(self._tensors), dtype=torch.int64, device=device)
        self._check = FiniteCheck(plan, rank)
        self._tables: dict[int, PackTable] = {}
        self._whole: PackTable | None = None

    def begin(self) -> None:
        """Once per sync, before the first bucket."""
        self._sums.zero_()
        self._flags.zero_()
        self._check.clear()

    def pack(self, index: int, memory: torch.Tensor, shards: list[Shard]) -> None:
        """Copies this rank's runs into its segment, cast to the wire dtype; copies may still run when it returns.

        Args:
            index: number of the bucket.
            memory: its slot.
            shards: all shards of this rank, by base index.
        """
        bucket = self.plan.buckets[index]
        origin = self.plan.origin(bucket, self._rank)
        if not self._kernel:
            pack_segment(memory, bucket, shards, segment_of(bucket, self._rank), origin)
            self._read_plain(index, memory, origin)
            return
        table = self._tables.get(index)
        if table is None:
            table = self._tables[index] = PackTable(
                self.plan, [bucket], self._rank, self._tensors, self._device, self._hashed or self._finite
            )
        table.find(shards)
        segment = memory.narrow(0, segment_of(bucket, self._rank) * bucket.stride - origin, bucket.stride)
        for part in table.alone:
            pack_slice(segment, part, shards[part.base])
        table.run(memory.data_ptr() - origin, self._sums, self._hashed, self._flags if self._finite else None)

    def read(self, shards: list[Shard], found: Found) -> None:
        """Hashes and checks everything where it lies, for engine ranks that read it there; may return early.

        Args:
            shards: all shards of this rank, by base index; none that ``LiveParameters`` refuses.
            found: where they are.
        """
        if not (self._hashed or self._finite):
            return
        if not self._kernel:
            for index, bucket in enumerate(self.plan.buckets):
                nbytes = bucket.stride if self.plan.sharded else bucket.nbytes
                self.pack(index, torch.empty(nbytes, dtype=torch.uint8, device=self._device), shards)
            return
        if self._whole is None or self._whole.found is not found:
            parts = (self.plan, self.plan.buckets, self._rank, self._tensors, self._device)
            self._whole = PackTable(*parts, read_alone=False, found=found)
        self._whole.refresh()
        self._whole.run(0, self._sums, self._hashed, self._flags if self._finite else None, copy=False)

    def _read_plain(self, index: int, memory: torch.Tensor, origin: int) -> None:
        if self._hashed:
            for hull in hulls_in_segment(self.plan.buckets[index], self._rank):
                data = memory[hull.first - origin : hull.end - origin]
                self._sums[self._tensors[hull.names[0]]] += hash_bytes(data, hull.first)
        if self._finite:
            self._check.add(index, memory)

    def sums(self) -> torch.Tensor:
        """The hash of what this rank packed of each tensor: int64 of shape ``(tensors,)``, numbered by ``numbers_of``,
        on the CPU. Waits for the device."""
        return self._sums.cpu()

    def broken(self) -> list[int]:
        """Indices of the buckets among which one has a NaN or Inf in this rank's part; none when all is finite. Waits
        for the device."""
        if not self._kernel:
            return self._check.broken()
        flagged = set(self._flags.nonzero().flatten().tolist())
        broken = {name for name, number in self._tensors.items() if number in flagged}
        return [i for i, bucket in enumerate(self.plan.buckets) if any(e.name in broken for e in bucket.entries)]


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
