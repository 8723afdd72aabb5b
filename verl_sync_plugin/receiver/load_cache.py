# SPDX-License-Identifier: Apache-2.0
"""What a load leaves in the cache of the engine's allocator goes back to the device before the load is committed.

The engine resumes its KV cache next, through an allocator of its own that cannot use what this one keeps. A first sync
leaves most: whole tensors that arrived in parts, and marks. At a memory share of 0.97 of an H100 the KV cache of 7.6 B
did not come back, while 1.0 GiB, its largest tensor's size, lay there (``docs/results.md``, ``memory-7b-…``).
"""

from __future__ import annotations

import torch

LEAST_BYTES = 64 << 20  # less is not worth the device's wait for the freeing


class LoadCache:
    """Of this engine rank; in every sync ``begin``, and behind the load ``give_back``. Nothing without a device."""

    def __init__(self) -> None:
        self._reserved = 0

    def begin(self) -> None:
        """Notes what the allocator holds before the load."""
        self._reserved = _reserved_bytes()

    def give_back(self) -> None:
        """Empties the allocator's cache where the load made it hold more; the load's work is done on the device."""
        if _reserved_bytes() - self._reserved >= LEAST_BYTES:
            torch.cuda.empty_cache()


def _reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
