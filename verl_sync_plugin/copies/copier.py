# SPDX-License-Identifier: Apache-2.0
"""The memory that blocks are read from, and two ways to copy them: the kernel, or one ``copy_`` per block.

A block's ``region`` is the one that it is read from, such as a segment of a bucket. There its source counts from the
bucket's first byte all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from verl_sync_plugin.copies.plain import Block, Memory, copy_runs, hash_block, runs
from verl_sync_plugin.copies.table import EXPONENTS, KernelTable, kernel_works


class BucketMemory(Memory):
    """One bucket: all of it in one slot, or each segment in the slot of the rank that packed it.

    Args:
        slots: one slot with all segments, or one per segment; uint8, contiguous.
        segment: bytes per segment.
        world: number of segments.

    Attributes:
        shared: other engine ranks read these slots, too.
    """

    def __init__(self, slots: Sequence[torch.Tensor], segment: int, world: int) -> None:
        assert len(slots) in (1, world), f"{len(slots)} slots for {world} segments"
        self.shared, self._segment = len(slots) > 1, segment
        flats = slots if self.shared else [slots[0]] * world
        starts = [flat.data_ptr() - self.shared * number * segment for number, flat in enumerate(flats)]
        super().__init__(slots[0].device, starts, flats)

    def holds(self, offset: int) -> tuple[torch.Tensor, int]:
        """The slot that holds byte ``offset`` of the bucket, and the place in it."""
        return self.at(offset // self._segment, offset)

    def narrow(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of one segment: uint8 of shape ``(nbytes,)``, a view."""
        slot, start = self.holds(offset)
        return slot.narrow(0, start, nbytes)


class _PlainTable:
    """Does the same as ``KernelTable``, block by block."""

    def __init__(self, blocks: list[Block], targets: Sequence[torch.Tensor]) -> None:
        self._blocks, self._targets = blocks, sorted(targets, key=torch.Tensor.data_ptr)

    def run(
        self, memory: Memory, sums: torch.Tensor, copy: bool = True, flags: torch.Tensor | None = None, target: int = 0
    ) -> None:
        for block in self._blocks:
            slot, source = memory.at(block.region, block.source)
            if block.ratio == 2:
                wide = runs(slot, source, 2 * block.width, block.count, block.source_stride).view(torch.float32)
                slot, source = wide.to(torch.bfloat16).view(torch.uint8).reshape(-1), 0  # now contiguous
                block = replace(block, source_stride=block.width, ratio=1)
            if copy:
                address = target + block.target
                flat = self._targets[bisect_right(self._targets, address, key=torch.Tensor.data_ptr) - 1]
                copy_runs(slot, source, flat, address - flat.data_ptr(), block)
            sums[block.group] += hash_block(slot, source, block)
            if flags is not None and block.dtype in EXPONENTS:  # there is no norm of 8-bit floats
                dtype = getattr(torch, block.dtype)
                found = runs(slot, source, block.width, block.count, block.source_stride).view(dtype)
                at_least = torch.float32 if dtype.itemsize < 4 else None
                largest = torch.linalg.vector_norm(found, float("inf"), dtype=at_least)  # NaN stays NaN
                flags[block.group] += ~largest.isfinite()


Prepared = KernelTable | _PlainTable  # blocks made ready once and run every sync


class Copier:
    """Makes blocks ready for ``device``, where their sources are, and ``targets``: the storages that they write to,
    each as uint8 of shape ``(n,)``."""

    def __init__(self, device: torch.device, targets: Sequence[torch.Tensor]) -> None:
        self.device, self._targets = device, targets
        self.kernel = kernel_works(device)

    def prepare(self, blocks: list[Block], homes: Sequence[int] = ()) -> Prepared:
        """Tables for the kernel, or views; ``homes`` as for ``KernelTable``."""
        if self.kernel:
            return KernelTable(blocks, self.device, homes)
        return _PlainTable(blocks, self._targets)
