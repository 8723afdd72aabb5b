# SPDX-License-Identifier: Apache-2.0
"""Rectangles of bytes. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` runs of ``width`` bytes, each ``*_stride`` bytes after the one before.

    Attributes:
        source: byte where the first run is read, relative to the source address number ``base``.
        target: byte where it is written, relative to one target address for all blocks.
        position: byte offset in the bucket of what is read or written; what the hash depends on.
        group: number of the sum that the block's hash goes into.
        grow: bytes read per byte written: 2 casts fp32 to bf16; ``width`` then counts what is written.
        dtype: of the elements written, where NaN and Inf are to be looked for; else empty.
    """

    source: int
    target: int
    position: int
    width: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0
    position_stride: int = 0
    base: int = 0
    group: int = 0
    grow: int = 1
    dtype: str = ""
