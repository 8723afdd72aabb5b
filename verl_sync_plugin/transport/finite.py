"""Whether everything packed is finite, found out with one read of the bytes and one transfer to the host per sync."""

from __future__ import annotations

import torch

from verl_sync_plugin.bucket import Bucket, Plan

Region = tuple[int, int, torch.dtype]  # byte offset, bytes, dtype


class FiniteCheck:
    """Collects the largest magnitude of every packed region on the device; NaN and Inf survive the maximum."""

    def __init__(self) -> None:
        self._regions: dict[tuple[str, int, int], list[Region]] = {}
        self._maxima: list[torch.Tensor] = []
        self._buckets: list[int] = []

    def clear(self) -> None:
        """Before a sync: forgets what a broken one left."""
        self._maxima, self._buckets = [], []

    def add(self, plan: Plan, index: int, segment: torch.Tensor, rank: int) -> None:
        """Takes note of one packed segment, without waiting for the device.

        Args:
            plan: the sync's plan.
            index: of the bucket.
            segment: uint8 of ``bucket.stride`` bytes, this rank's part of the bucket.
            rank: this rank's place among the owners.
        """
        key = (plan.digest, index, rank)
        if key not in self._regions:
            self._regions = {held: regions for held, regions in self._regions.items() if held[0] == plan.digest}
            self._regions[key] = _regions(plan, plan.buckets[index], rank)
        parts = [segment.narrow(0, offset, size).view(dtype) for offset, size, dtype in self._regions[key]]
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


def _regions(plan: Plan, bucket: Bucket, rank: int) -> list[Region]:
    """What the rank's runs fill, neighbours joined. Never the gaps between them, where anything may lie."""
    regions: list[Region] = []
    for part in bucket.slices:
        base = plan.bases[part.base]
        numel = min(part.end, base.lengths[rank if len(base.lengths) > 1 else 0]) - part.begin
        dtype = getattr(torch, base.dtype)
        if numel <= 0 or not dtype.is_floating_point or base.itemsize == 1:  # no norm of 8-bit floats
            continue
        size = numel * base.itemsize
        if regions and regions[-1][2] == dtype and sum(regions[-1][:2]) == part.offset:
            regions[-1] = (regions[-1][0], regions[-1][1] + size, dtype)
        else:
            regions.append((part.offset, size, dtype))
    return regions
