"""How a trainer rank tells memory that engine ranks of its host map: staging memory, and that of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StagingExport:
    """How to open the sender's staging memory.

    Attributes:
        kind: ``cuda_ipc`` or ``shared_memory``.
        key: changes whenever the memory behind it does; the receiver opens each key once.
        nbytes: size of all slots together.
        slot_bytes: size of one slot.
        handle: what the mechanism needs, builtins only.
    """

    kind: str
    key: str
    nbytes: int
    slot_bytes: int
    handle: tuple[Any, ...]


@dataclass(frozen=True)
class Region:
    """An allocation of a trainer rank and how to map it.

    Attributes:
        kind: ``cuda_ipc`` or ``shared_file``.
        key: names the allocation, on this host and in this run; never given to another one.
        nbytes: its size.
        handle: what the mechanism needs, builtins only.
    """

    kind: str
    key: str
    nbytes: int
    handle: tuple[Any, ...]


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
