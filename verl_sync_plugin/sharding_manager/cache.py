"""Hands back a part of what torch's CUDA allocator has cached.

torch has one call for that, which hands back everything. So what is to stay is allocated for that moment: a request of
exactly a free block's size gets that block, and costs nothing. Which blocks, decides ``free_blocks.py``. Each address
is compared with the plan; if anything else happens than was planned, everything goes, as with torch's call alone.

Peaks: what is held counts as allocated, though never beyond what is reserved anyway. Where it has raised torch's peak,
the peaks are reset, since they cannot be set to what they were. Before a sync that loses nothing: the sync resets them
itself (``PeakMemory``). After it, ``SyncReport.peak_device_bytes`` has been taken by then, and verl's
``perf/max_memory_allocated_gb`` counts from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from verl_sync_plugin.sharding_manager.free_blocks import Hold, Segment, choose, free_blocks

logger = logging.getLogger(__name__)


class Allocator(Protocol):
    """What is needed of the allocator of one device; sizes in bytes."""

    def segments(self) -> Sequence[Segment]: ...

    def allocate(self, nbytes: int, stream: int) -> int: ...

    def free(self, address: int) -> None: ...

    def empty(self) -> None: ...

    def reserved(self) -> int: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...

    def set_expandable(self, enabled: bool) -> None: ...


class CudaAllocator:
    """torch's. Not tensors but its raw calls: in deterministic mode torch fills new tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def segments(self) -> Sequence[Segment]:
        """Nothing where torch has another allocator, of which nothing is known."""
        if torch.cuda.get_allocator_backend() != "native":
            return []
        # Every allocation first takes back blocks that other streams have done with, and merges them with their
        # neighbours. That must not happen between the snapshot and the holds.
        torch.cuda.synchronize(self._device)
        self.free(self.allocate(1, 0))
        return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._device.index]

    def allocate(self, nbytes: int, stream: int) -> int:
        """For a stream: its ``cudaStream_t``, as in the snapshot.

        Raises:
            OutOfMemoryError: neither cached nor free.
        """
        address: int = torch.cuda.caching_allocator_alloc(nbytes, self._device, stream)
        return address

    def free(self, address: int) -> None:
        torch.cuda.caching_allocator_delete(address)

    def empty(self) -> None:
        torch.cuda.empty_cache()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def set_expandable(self, enabled: bool) -> None:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enabled}")


def release_cache(device: torch.device, missing: int | None) -> int:
    """Hands cached memory of a device back; expandable segments are switched off, as the worker has them in a sync.

    Args:
        device: one without memory of its own has no cache.
        missing: bytes; ``None`` for everything.

    Returns:
        Bytes that went; less than ``missing`` when not enough was cached, or when more had to stay than was known.
    """
    return release(CudaAllocator(device), missing) if device.type == "cuda" else 0


def release(allocator: Allocator, missing: int | None) -> int:
    """``release_cache`` with a given allocator."""
    before = allocator.reserved()
    if missing is None or not _release_part(allocator, missing):
        allocator.empty()
    return before - allocator.reserved()


def _release_part(allocator: Allocator, missing: int) -> bool:
    """Whether it went as planned."""
    blocks = free_blocks(allocator.segments())
    holds = choose(blocks, missing)
    if not holds:
        return False
    # Hazard: with the setting off the allocator gives out no block of an expandable segment, and maps new memory
    # instead. verl trains with it on, so most of the cache is of that kind.
    expandable = any(block.pages_end is not None for block in blocks)
    peak, held = allocator.peak(), list[int]()
    if expandable:
        allocator.set_expandable(True)
    try:
        if _hold(allocator, holds, held):
            allocator.empty()
            return True
        return False
    finally:
        for address in held:
            allocator.free(address)
        if expandable:
            allocator.set_expandable(False)
        if allocator.peak() > peak:
            allocator.reset_peak()


def _hold(allocator: Allocator, holds: Sequence[Hold], held: list[int]) -> bool:
    """Allocates into ``held``; ``False`` at the first that is not what was planned."""
    for hold in holds:
        try:
            held.append(allocator.allocate(hold.size, hold.stream))
        except torch.OutOfMemoryError:
            return False
        if held[-1] != hold.address:
            logger.warning("verl-sync-plugin: the whole cache goes, torch gave another block of %d bytes", hold.size)
            return False
    return True
