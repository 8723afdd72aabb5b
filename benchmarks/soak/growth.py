# SPDX-License-Identifier: Apache-2.0
"""Whether something grows over many syncs: its median late in the run against that early in the run.

Early is from a tenth to 35 % of the syncs (of 200: 20 to 70), when everything is set up; late is the last quarter (of
200: the last 50). A trend line would be drawn up by one late step, and a maximum by one odd sample.
"""

from __future__ import annotations

import statistics
from typing import Any

MIB = 2**20
EARLY = (0.1, 0.35)
LATE = (0.75, 1.0)
# Allowed growth between the windows. One bucket kept per sync is far more than any of these; a leak of 130 kB per sync
# in Python objects reaches 16 MiB within the 130 syncs between them.
ALLOWED: dict[str, float] = {
    "device_used_bytes": 64 * MIB,  # CUDA's own pools grow in steps
    "trainer.torch_allocated_bytes": 1 * MIB,
    "trainer.torch_reserved_bytes": 32 * MIB,  # the allocator's larger segments
    "trainer.rss_bytes": 16 * MIB,
    "trainer.fds": 2,  # a socket that is about to be closed
    "trainer.threads": 2,  # a pool that has not yet reached its size
    "trainer.shared_bytes": 0,  # mapped: staging memory, which is one piece for the whole run
    "schedulers.rss_bytes": 16 * MIB,
    "schedulers.fds": 2,
    "schedulers.threads": 2,
    "schedulers.shared_bytes": 0,
    "rollout.rss_bytes": 16 * MIB,  # of a separate rollout, the process beside the scheduler
    "rollout.fds": 2,
    "rollout.threads": 2,
    "rollout.shared_bytes": 0,
}
# of the early seconds; without an accelerator the neighbours on the machine decide, so it is not looked at
ALLOWED_SECONDS_SHARE = 0.25


def _value(sample: dict[str, Any], name: str) -> float | None:
    part, _, key = name.rpartition(".")
    value = (sample.get(part, {}) if part else sample).get(key)
    return None if value is None else float(value)


def _median(samples: list[dict[str, Any]], name: str, window: tuple[float, float], syncs: int) -> float | None:
    first, last = window[0] * syncs, window[1] * syncs
    values = [_value(sample, name) for sample in samples if first <= sample["sync"] <= last]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def of(samples: list[dict[str, Any]], syncs: int, device: str) -> dict[str, dict[str, float]]:
    """Early and late medians of everything that was sampled, and how much more late may be."""
    found = {}
    for name in (*ALLOWED, *(["seconds"] if device == "cuda" else [])):
        early, late = (_median(samples, name, window, syncs) for window in (EARLY, LATE))
        if early is not None and late is not None:
            allowed = ALLOWED.get(name, early * ALLOWED_SECONDS_SHARE)
            found[name] = {"early": early, "late": late, "allowed": allowed}
    return found


def problems(growth: dict[str, dict[str, float]]) -> list[str]:
    """What grew by more than is allowed."""
    return [
        f"{name} grew from {found['early']:g} to {found['late']:g}, allowed are {found['allowed']:g} more"
        for name, found in growth.items()
        if found["late"] - found["early"] > found["allowed"]
    ]
