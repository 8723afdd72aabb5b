# SPDX-License-Identifier: Apache-2.0
"""How much device memory the engine needs beside its weights and its KV cache: what its allocator took for a while."""

from __future__ import annotations

import torch


class Activations:
    """Of this engine rank, from sync to sync.

    What the engine keeps (weights, KV cache, CUDA graphs) is in its allocator's count also while it is asleep, so the
    least count at any sync stands for it. Resets the allocator's peaks, which nobody else in the
    engine's process may count on.
    """

    def __init__(self) -> None:
        self._least: int | None = None

    def take(self) -> int:
        """Bytes allocated beyond that since the last call; 0 at the first, whose peak is of the engine's start, and
        without a device."""
        if not torch.cuda.is_available():
            return 0
        counts = torch.cuda.memory_stats_as_nested_dict().get("reserved_bytes", {}).get("all", {})
        current, peak, least = int(counts.get("current", 0)), int(counts.get("peak", 0)), self._least
        torch.cuda.reset_peak_memory_stats()
        self._least = current if least is None else min(current, least)
        return 0 if least is None else peak - self._least
