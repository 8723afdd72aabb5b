# SPDX-License-Identifier: Apache-2.0
"""Runs, plain or strided, and what two of them have in common. Pure; imports no torch.

Everything that a sync moves is described by runs: where the elements of a tensor lie in a base (a share), where the
bytes of a tensor lie in a bucket (a piece), where the engine's model puts them, where a trainer rank holds them. What
goes from a bucket into the model is then what goes through two runs, from the bucket into the tensor and from the
tensor into the model; planning, cutting and reading in place are all done by ``compose``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec


class Run(msgspec.Struct, frozen=True, array_like=True, order=True):
    """``count`` times ``width`` bytes (or elements): those from ``source + i * source_stride`` on are those from
    ``target + i * target_stride`` on.

    A plain run has a ``count`` of 1. A plan may have 150000 runs, and the engine is sent them: a struct of msgspec is
    made in a tenth of a dataclass's time, and travels as an array.
    """

    source: int
    target: int
    width: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    def in_bytes(self, size: int) -> Run:
        """A run of elements of ``size`` bytes as one of bytes."""
        strides = (self.source_stride * size, self.target_stride * size)
        return Run(self.source * size, self.target * size, self.width * size, self.count, *strides)

    def repeats(self) -> Iterator[Run]:
        """The same as plain runs."""
        for i in range(self.count):
            yield Run(self.source + i * self.source_stride, self.target + i * self.target_stride, self.width)

    def sources(self) -> Iterator[tuple[int, int]]:
        """The source's intervals, (first, one past the last)."""
        if self.count == 1 or self.source_stride == self.width:
            yield self.source, self.source + self.width * self.count
            return
        for i in range(self.count):
            yield self.source + i * self.source_stride, self.source + i * self.source_stride + self.width


def in_step(first: Run, second: Run) -> bool:
    """True if what ``first`` writes and ``second`` reads follows the same rows, so that they compose to a few runs."""
    return first.count == 1 or second.count == 1 or first.target_stride == second.source_stride


def compose(first: Run, second: Run) -> list[Run]:
    """Joins two runs: from the source of ``first`` to the target of ``second``.

    Args:
        first: its target is the space that ``second`` reads. Its repetitions do not overlap there.
        second: its width counts bytes of that space. Its repetitions do not overlap there either.

    Returns:
        Runs whose widths are in bytes read: a few where the two are in step, else a few for each repetition.
    """
    if first.count == 1 == second.count:
        low = max(first.target, second.source)
        width = min(first.target + first.width, second.source + second.width) - low
        if width <= 0:
            return []
        return [Run(first.source + low - first.target, second.target + low - second.source, width)]
    assert (first.count == 1 or first.target_stride >= first.width) and (
        second.count == 1 or second.source_stride >= second.width
    ), "the repetitions of a run overlap"
    if not in_step(first, second):
        return [run for plain in first.repeats() for run in compose(plain, second)]
    source_stride = first.source_stride if first.count > 1 else second.source_stride
    target_stride = second.target_stride if second.count > 1 else first.target_stride
    found = []
    for i, j, count, low, width in _common(first, second):
        source = first.source + i * first.source_stride + low - (first.target + i * first.target_stride)
        moved = low - (second.source + j * second.source_stride)
        strides = (source_stride, target_stride) if count > 1 else (0, 0)
        found.append(Run(source, second.target + j * second.target_stride + moved, width, count, *strides))
    return found


def _common(first: Run, second: Run) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields what two runs in step share: repetitions of both, from there on how many, first byte, width."""
    if first.count == 1:
        window = first.target, first.target + first.width
        for j, count, low, width in _within(second.source, second.width, second.count, second.source_stride, *window):
            yield 0, j, count, low, width
    elif second.count == 1:
        window = second.source, second.source + second.width
        for i, count, low, width in _within(first.target, first.width, first.count, first.target_stride, *window):
            yield i, 0, count, low, width
    else:
        yield from _row_by_row(first, second)


def _within(
    start: int, width: int, count: int, stride: int, low: int, high: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields repetitions within ``[low, high)``, the outer ones cut: number, how many follow, first byte, width."""
    first = max(0, (low - start - width) // stride + 1)  # the first that ends after ``low``
    last = min(count - 1, (high - 1 - start) // stride)  # the last that begins before ``high``
    if first <= last and start + first * stride < low:
        yield first, 1, low, min(start + first * stride + width, high) - low
        first += 1
    cut = first <= last and start + last * stride + width > high
    whole = last - cut - first + 1
    if whole > 0:
        yield first, whole, start + first * stride, width
    if cut:
        yield last, 1, start + last * stride, high - start - last * stride


def _row_by_row(first: Run, second: Run) -> Iterator[tuple[int, int, int, int, int]]:
    """``_common`` of two that repeat: for the one or two shifts of repetitions at which they overlap."""
    stride = second.source_stride
    gap = second.source - first.target
    for shift in range(-((gap + second.width - 1) // stride), (first.width - 1 - gap) // stride + 1):
        at = gap + shift * stride  # where the second's begins, seen from the first's
        begin, end = max(at, 0), min(at + second.width, first.width)
        i, count = max(0, -shift), min(first.count, second.count - shift) - max(0, -shift)
        if begin < end and count > 0:
            yield i, i + shift, count, first.target + i * stride + begin, end - begin


def in_rows(run: Run, columns: int) -> Iterator[Run]:
    """Cuts what goes into a matrix into runs whose repetitions lie in the same columns of rows that follow on."""
    if run.count > 1 and run.target_stride == columns and run.target % columns + run.width <= columns:
        yield run
        return
    for plain in run.repeats():
        source, target, left = plain.source, plain.target, plain.width
        while left:
            column = target % columns
            count, width = (left // columns, columns) if column == 0 and left >= columns else (1, 0)
            width = width or min(left, columns - column)
            yield Run(source, target, width, count, columns, columns)
            source, target, left = source + count * width, target + count * width, left - count * width


class Partition:
    """Plain runs, in ascending order of target, whose targets are disjoint parts of one space."""

    def __init__(self, parts: Sequence[Run]) -> None:
        self._parts = parts
        self._ends = [part.target + part.width for part in parts]
        overlaps = any(part.target < end for part, end in zip(parts[1:], self._ends, strict=False))
        assert not overlaps, "parts of a partition overlap"

    def meet(self, run: Run) -> Iterator[tuple[int, Run]]:
        """Every part that a run reads of, by number, with what goes through both; see ``compose``."""
        index, end = bisect_right(self._ends, run.source), run.source + (run.count - 1) * run.source_stride + run.width
        while index < len(self._parts) and self._parts[index].target < end:
            for common in compose(self._parts[index], run):
                yield index, common
            index += 1
