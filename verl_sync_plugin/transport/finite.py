"""Whether everything packed is finite, where the copy kernel does not find out by the way.

Costs one read of the bytes and one transfer to the host per sync.
"""

from __future__ import annotations

import torch

from verl_sync_plugin.bucket import Bucket, Plan

Region = tuple[int, int, torch.dtype]  # first byte, one past the last, dtype


class FiniteCheck:
    """Collects the largest magnitude of every packed region on the device; NaN and Inf survive the maximum.

    Args:
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._regions: dict[int, list[Region]] = {}
        self._maxima: list[torch.Tensor] = []
        self._buckets: list[int] = []

    def clear(self) -> None:
        """Before a sync: forgets what a broken one left."""
        self._maxima, self._buckets = [], []

    def add(self, index: int, memory: torch.Tensor) -> None:
        """Takes note of one packed segment, without waiting for the device.

        Args:
            index: of the bucket.
            memory: the bucket's slot, as for ``Packer.pack``.
        """
        bucket = self._plan.buckets[index]
        if index not in self._regions:
            self._regions[index] = _regions(bucket, self._rank if bucket.world > 1 else 0)
        origin = self._plan.origin(bucket, self._rank)
        parts = [memory[low - origin : high - origin].view(dtype) for low, high, dtype in self._regions[index]]
        if parts:
            self._maxima.append(torch.stack([norm.float() for norm in torch._foreach_norm(parts, float("inf"))]))
            self._buckets.append(index)

    def broken(self) -> list[int]:
        """Indices of the buckets with a NaN or Inf in this rank's part; waits for the device. Clears."""
        if not self._maxima:
            return []
        flags = torch.stack([maxima.max() for maxima in self._maxima]).isfinite().tolist()
        found = [index for index, fine in zip(self._buckets, flags, strict=True) if not fine]
        self.clear()
        return found


def _regions(bucket: Bucket, segment: int) -> list[Region]:
    """What the segment holds of any tensor, neighbours joined. Never what lies between, where anything may be."""
    low, high = segment * bucket.stride, (segment + 1) * bucket.stride
    found: set[Region] = set()
    for entry in bucket.entries:
        dtype = getattr(torch, entry.dtype)
        if dtype.is_floating_point and dtype.itemsize > 1:  # there is no norm of 8-bit floats
            pieces = [piece for piece in entry.pieces if low <= piece.offset < high]
            found.update((*span, dtype) for piece in pieces for span in piece.spans())
    regions: list[Region] = []
    for begin, end, dtype in sorted(found, key=lambda region: region[:2]):
        if regions and regions[-1][2] == dtype and begin <= regions[-1][1]:
            regions[-1] = (regions[-1][0], max(end, regions[-1][1]), dtype)
        else:
            regions.append((begin, end, dtype))
    return regions
