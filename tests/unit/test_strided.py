# SPDX-License-Identifier: Apache-2.0
"""Two runs against a table of single bytes, and the runs of a box against slicing."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.layout.load_map import box_runs
from verl_sync_plugin.layout.strided import Partition, Run, compose, in_step


def moves(run: Run) -> list[tuple[int, int]]:
    """Byte by byte, where it is read and where it goes."""
    starts = [(run.source + i * run.source_stride, run.target + i * run.target_stride) for i in range(run.count)]
    return [(source + byte, target + byte) for source, target in starts for byte in range(run.width)]


def expected(first: Run, second: Run) -> list[tuple[int, int]]:
    """Byte by byte, what goes through both."""
    origin = {target: source for source, target in moves(first)}
    return sorted((origin[byte], to) for byte, to in moves(second) if byte in origin)


@st.composite
def runs(draw: st.DrawFn, strides: st.SearchStrategy[int] | None = None) -> Run:
    """``strides``: of the side that meets the other run; what is drawn is turned as needed."""
    width = draw(st.integers(1, 8))
    count = draw(st.integers(1, 6))
    gap, other = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    stride = width + gap if strides is None else max(width, draw(strides))
    far = (stride, width + other) if count > 1 else (0, 0)
    return Run(draw(st.integers(0, 30)), 1000 + draw(st.integers(0, 30)), width, count, *far)


def turned(run: Run) -> Run:
    """Backwards: its target is where it was read."""
    return Run(run.target, run.source, run.width, run.count, run.target_stride, run.source_stride)


SAME = st.shared(st.integers(4, 14), key="stride")


@settings(max_examples=1000, deadline=None)
@given(runs().map(turned) | runs(SAME).map(turned), runs() | runs(SAME))
def test_exactly_what_goes_through_both(first: Run, second: Run) -> None:
    found = compose(first, second)
    assert sorted(move for run in found for move in moves(run)) == expected(first, second)
    assert all(run.count > 1 or (run.source_stride, run.target_stride) == (0, 0) for run in found)
    if in_step(first, second):
        assert len(found) <= 3, "one run for each row"
    if first.count == second.count == 1:
        assert len(found) <= 1


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=12), runs())
def test_a_run_meets_every_part_that_it_reads(drawn: list[tuple[int, int]], run: Run) -> None:
    parts, at = [], 0
    for number, (gap, width) in enumerate(drawn):
        at += gap
        parts.append(Run(5000 * number, at, width))
        at += width
    met = list(Partition(parts).meet(run))
    for number, part in enumerate(parts):
        of_part = sorted(move for index, common in met if index == number for move in moves(common))
        assert of_part == expected(part, run)
    assert [index for index, _ in met] == sorted(index for index, _ in met)


def test_columns_in_step_are_one_run() -> None:
    """Half the columns of 4096 rows out of a bucket, and a quarter of them into the model."""
    piece, columns = Run(64, 0, 64, 4096, 64, 128), Run(32, 7000, 32, 4096, 128, 32)
    assert compose(piece, columns) == [Run(96, 7000, 32, 4096, 64, 32)]
    assert compose(piece, Run(0, 0, 4096 * 128)) == [Run(64, 0, 64, 4096, 64, 128)]
    assert not in_step(piece, Run(0, 0, 32, 8192, 64, 32)) and in_step(piece, columns)
    assert list(Run(8, 0, 4, 3, 4, 9).sources()) == [(8, 20)], "rows without gaps are one interval"
    assert list(Run(8, 0, 4, 2, 6, 9).sources()) == [(8, 12), (14, 18)]


@pytest.mark.parametrize("stride", [-8, 0, 3])
def test_repetitions_that_overlap_are_nobodys(stride: int) -> None:
    plain, overlapping = Run(0, 0, 64), Run(0, 0, 4, 3, stride, stride)
    for pair in ((plain, overlapping), (overlapping, plain)):
        with pytest.raises(AssertionError, match="overlap"):
            compose(*pair)


def test_boxes_of_one_to_four_dimensions_are_where_slicing_puts_them() -> None:
    chance = random.Random(1)
    for _ in range(600):
        whole = [chance.randint(1, 5) for _ in range(chance.randint(1, 4))]
        size = [length if chance.random() < 0.5 else chance.randint(1, length) for length in whole]
        offset = [chance.randint(0, length - held) for length, held in zip(whole, size, strict=True)]
        box, found, expected = torch.arange(1, 1 + math.prod(size)), torch.zeros(math.prod(whole)), torch.zeros(whole)
        for run in (plain for each in box_runs(size, offset, whole) for plain in each.repeats()):
            part = found[run.target : run.target + run.width]
            assert part.numel() == run.width and not part.any(), "written twice, or outside"
            part.copy_(box[run.source : run.source + run.width])
        expected[tuple(slice(at, at + held) for at, held in zip(offset, size, strict=True))] = box.view(size).float()
        assert torch.equal(found.view(whole), expected), (size, offset, whole)


def test_few_runs_where_rows_lie_at_one_stride() -> None:
    assert len(box_runs([], [], [])) == len(box_runs((4, 8), (0, 0), (4, 8))) == 1, "no dimensions, or all of it"
    assert len(box_runs((64, 3, 8), (0, 5, 0), (64, 9, 8))) == 1, "a part of each of 64 experts"
    assert len(box_runs((64, 9, 4), (0, 0, 4), (64, 9, 8))) == 1, "columns of all experts"
    assert len(box_runs((2, 3, 4), (1, 2, 3), (8, 9, 8))) == 2
