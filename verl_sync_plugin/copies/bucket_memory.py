"""Where the bytes of a bucket lie on the reading side."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BucketMemory:
    """One bucket in one slot, or each of its segments in the slot of the rank that packed it.

    Args:
        slots: one slot with all segments, or one per segment; uint8, contiguous.
        segment: bytes per segment.
        world: number of segments.
    """

    def __init__(self, slots: Sequence[torch.Tensor], segment: int, world: int) -> None:
        assert len(slots) in (1, world), f"{len(slots)} slots for {world} segments"
        self._slots = tuple(slots)
        self._segment = segment
        self._world = world

    @property
    def device(self) -> torch.device:
        return self._slots[0].device

    def at(self, offset: int) -> tuple[torch.Tensor, int]:
        """The slot that holds byte ``offset`` of the bucket, and the offset in it."""
        if len(self._slots) == 1:
            return self._slots[0], offset
        segment = offset // self._segment
        return self._slots[segment], offset - segment * self._segment

    def narrow(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of one segment: uint8 of shape ``(nbytes,)``, a view."""
        slot, start = self.at(offset)
        return slot.narrow(0, start, nbytes)

    def addresses(self) -> tuple[int, ...]:
        """For each segment, the address at which byte 0 of the bucket would lie if all were as that segment is."""
        if len(self._slots) == 1:
            return (self._slots[0].data_ptr(),) * self._world
        return tuple(slot.data_ptr() - number * self._segment for number, slot in enumerate(self._slots))
