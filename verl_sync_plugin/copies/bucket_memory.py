# SPDX-License-Identifier: Apache-2.0
"""The memory from which the reading side copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from verl_sync_plugin.copies.blocks import Block


class Memory(Protocol):
    """Memory that blocks are read from."""

    @property
    def device(self) -> torch.device: ...

    def of(self, block: Block) -> tuple[torch.Tensor, int]:
        """The memory that a block is read from (uint8 of shape ``(n,)``), and its first byte there."""

    def addresses(self) -> tuple[int, ...]:
        """The addresses from which the sources of blocks count, by their ``base``."""


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

    @property
    def shared(self) -> bool:
        """Other engine ranks read these slots too."""
        return len(self._slots) > 1

    def at(self, offset: int) -> tuple[torch.Tensor, int]:
        """The slot that holds byte ``offset`` of the bucket, and the offset in it."""
        if len(self._slots) == 1:
            return self._slots[0], offset
        segment = offset // self._segment
        return self._slots[segment], offset - segment * self._segment

    def of(self, block: Block) -> tuple[torch.Tensor, int]:
        return self.at(block.source)

    def narrow(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of one segment: uint8 of shape ``(nbytes,)``, a view."""
        slot, start = self.at(offset)
        return slot.narrow(0, start, nbytes)

    def addresses(self) -> tuple[int, ...]:
        """For each segment, the address at which byte 0 of the bucket would lie if all were as that segment is."""
        if len(self._slots) == 1:
            return (self._slots[0].data_ptr(),) * self._world
        return tuple(slot.data_ptr() - number * self._segment for number, slot in enumerate(self._slots))


class RegionMemory:
    """Allocations of trainer ranks; the source of a block counts from the first byte of number ``base``.

    Args:
        device: the reading one.
        found: their addresses.
        flats: all their bytes (uint8), where the device is the host; else none.
    """

    def __init__(self, device: torch.device, found: Sequence[int], flats: Sequence[torch.Tensor] = ()) -> None:
        self.device = device
        self._found = tuple(found)
        self._flats = tuple(flats)

    def of(self, block: Block) -> tuple[torch.Tensor, int]:
        return self._flats[block.base], block.source

    def addresses(self) -> tuple[int, ...]:
        return self._found
