"""Whether everything packed is finite, found out with one read of the bytes and one transfer to the host per sync."""

from __future__ import annotations

import torch

from verl_sync_plugin.bucket import Bucket, Plan
from verl_sync_plugin.transport.packing import origin_of

Region = tuple[int, int, torch.dtype]  # first byte, one past the last, dtype


class FiniteCheck:
    """Collects the largest magnitude of every packed region on the device; NaN and Inf survive the maximum."""

    def __init__(self) -> None:
        self._regions: dict[tuple[str, int, int], list[Region]] = {}
        self._maxima: list[torch.Tensor] = []
        self._buckets: list[int] = []

    def clear(self) -> None:
        """Before a sync: forgets what a broken one left."""
        self._maxima, self._buckets = [], []

    def add(self, plan: Plan, index: int, memory: torch.Tensor, segment: int) -> None:
        """Takes note of one packed segment, without waiting for the device.

        Args:
            plan: the sync's plan.
            index: of the bucket.
            memory: the bucket's slot, as for ``Packer.pack``.
            segment: which of its segments this rank has packed.
        """
        key = (plan.digest, index, segment)
        if key not in self._regions:
            self._regions = {held: regions for held, regions in self._regions.items() if held[0] == plan.digest}
            self._regions[key] = _regions(plan.buckets[index], segment)
        origin = origin_of(plan, plan.buckets[index], segment)
        parts = [memory[low - origin : high - origin].view(dtype) for low, high, dtype in self._regions[key]]
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
