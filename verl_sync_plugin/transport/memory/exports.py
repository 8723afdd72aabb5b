# SPDX-License-Identifier: Apache-2.0
"""Descriptions of memory that a trainer rank shares and engine ranks of its host map: staging memory and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Region:
    """Memory of a trainer rank and how to map it.

    Attributes:
        kind: ``cuda_ipc``, ``shared_memory`` or ``shared_file``.
        key: names the memory, on this host and in this run, and no other memory ever; the receiver maps each key once.
        nbytes: its size.
        handle: what the mechanism needs: numbers, texts and bytes, which travel as they are (no lists, no tuples).
    """

    kind: str
    key: str
    nbytes: int
    handle: tuple[Any, ...]


@dataclass(frozen=True)
class StagingExport(Region):
    """The sender's staging memory.

    Attributes:
        slot_bytes: size of one of its slots.
    """

    slot_bytes: int


@dataclass(frozen=True)
class Live:
    """Where one trainer rank's runs of all buckets lie.

    Attributes:
        key: names all of this; changes when anything moves.
        regions: the allocations.
        runs: per bucket little-endian int64 of shape ``(n, 5)``, ascending: first byte in the bucket, bytes in the
            bucket, region, first byte in the region, bytes there per byte in the bucket.
    """

    key: str
    regions: tuple[Region, ...]
    runs: tuple[bytes, ...]
