"""What is copied: rectangles of bytes, and how buckets cut them. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """``lines`` runs of ``width`` bytes, each ``*_stride`` bytes after the one before.

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
    lines: int = 1
    source_stride: int = 0
    target_stride: int = 0
    position_stride: int = 0
    base: int = 0
    group: int = 0
    grow: int = 1
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """Runs of elements inside one tensor and where they go: bytes ``start + i * stride`` of the tensor are read.

    ``width`` and ``stride`` are bytes of the source; a cast makes the target's runs wider or narrower.
    """

    start: int
    width: int
    count: int
    stride: int
    target: int
    target_stride: int


def clip(lines: Lines, low: int, high: int, grow: tuple[int, int] = (1, 1)) -> Iterator[Lines]:
    """The part of ``lines`` that lies in bytes ``[low, high)`` of the tensor: whole runs and up to two cut ones.

    Args:
        lines: with ``stride >= width`` when there are several.
        low: first byte.
        high: one past the last byte.
        grow: bytes of the target per bytes of the source, as numerator and denominator.
    """
    stride = lines.stride if lines.count > 1 else max(lines.width, 1)
    first = max(0, (low - lines.start - lines.width) // stride + 1)
    last = min(lines.count - 1, -((lines.start - high) // stride) - 1)
    if first > last:
        return
    whole_first = first + (lines.start + first * stride < low)
    whole_last = last - (lines.start + last * stride + lines.width > high)
    if whole_first <= whole_last:
        yield Lines(
            lines.start + whole_first * stride,
            lines.width,
            whole_last - whole_first + 1,
            lines.stride,
            lines.target + whole_first * lines.target_stride,
            lines.target_stride,
        )
    for cut in {first, last} - set(range(whole_first, whole_last + 1)):
        begin = lines.start + cut * stride
        lower, upper = max(begin, low), min(begin + lines.width, high)
        target = lines.target + cut * lines.target_stride + (lower - begin) * grow[0] // grow[1]
        yield Lines(lower, upper - lower, 1, 0, target, 0)
