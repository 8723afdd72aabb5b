# SPDX-License-Identifier: Apache-2.0
"""The six intersections that ``layout/strided.py`` takes the place of do the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_strided import SAME, SCALES, UNIT, Scale, doubled, moves, runs, turned

from verl_sync_plugin.copies.blocks import Block, Lines, clip
from verl_sync_plugin.copies.hulls import Hull
from verl_sync_plugin.copies.pack_table import PackTable
from verl_sync_plugin.layout import joint, planner
from verl_sync_plugin.layout.strided import Partition, Run, compose, in_step
from verl_sync_plugin.layout.tensors import Base, Piece, Share, Slice, View
from verl_sync_plugin.receiver.direct import _Where
from verl_sync_plugin.receiver.rows import row_by_row
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.protocol import Manifest


def as_lines(run: Run) -> Lines:
    return Lines(run.source, run.width, run.count, run.source_stride, run.target, run.target_stride)


def as_run(lines: Lines) -> Run:
    return Run(lines.start, lines.target, lines.width, lines.count, lines.stride, lines.target_stride)


def all_moves(found: list[Run], scale: Scale) -> list[tuple[int, int]]:
    return sorted(move for run in found for move in moves(run, scale))


@settings(max_examples=500, deadline=None)
@given(runs(), st.integers(0, 40), st.integers(1, 40), st.sampled_from(SCALES))
def test_clip(run: Run, low: int, width: int, scale: Scale) -> None:
    run = doubled(run, scale)
    low, high = UNIT * low, UNIT * (low + width)
    before = [as_run(part) for part in clip(as_lines(run), low, high, scale)]
    found = compose(Run(low, low, high - low), run, scale)
    assert all_moves(found, scale) == all_moves(before, scale) and len(found) <= len(before)


@settings(max_examples=500, deadline=None)
@given(runs(SAME).map(turned) | runs().map(turned), runs(SAME) | runs(), st.sampled_from(SCALES))
def test_row_by_row(first: Run, second: Run, scale: Scale) -> None:
    if first.count == 1 or not in_step(first, second):
        return
    second = doubled(second, scale)
    piece = Piece(first.source, first.width, first.target, first.count, first.source_stride, first.target_stride)
    before = [as_run(part) for part in row_by_row(as_lines(second), piece, scale)]
    found = compose(first, second, scale)
    assert all_moves(found, scale) == all_moves(before, scale) and len(found) <= len(before)


@settings(max_examples=500, deadline=None)
@given(runs(), st.integers(0, 40), st.integers(1, 40))
def test_shares(run: Run, low: int, width: int) -> None:
    share = Share(run.source, run.target, run.width, run.count, run.source_stride, run.target_stride)
    before = joint._within(share, UNIT * low, UNIT * (low + width))
    found = compose(Run(UNIT * low, UNIT * low, UNIT * width), run)
    assert sorted(found) == sorted(Run(s.start, s.target, s.run, s.count, s.step, s.stride) for s in before)


@st.composite
def tiled(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(first, width), ascending and disjoint."""
    found, at = [], 0
    for gap, width in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=8)):
        found.append((at + UNIT * gap, UNIT * width))
        at += UNIT * (gap + width)
    return found


@settings(max_examples=300, deadline=None)
@given(tiled(), st.integers(0, 60), st.integers(1, 60))
def test_pack_table(parts: list[tuple[int, int]], low: int, width: int) -> None:
    hulls = [Hull(first, first + size, (f"w{i}",)) for i, (first, size) in enumerate(parts)]
    table = object.__new__(PackTable)
    table._tensors = {f"w{i}": i for i in range(len(parts))}
    before = list(table._cut(hulls, 0, low, low + width))
    found = Partition([Run(first, first, size) for first, size in parts]).meet(Run(low, 0, width))
    assert [(run.source, run.source + run.width, number) for number, run in found] == before


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9), st.integers(0, 40),
       st.integers(1, 40))  # fmt: skip
def test_planner(lengths: list[int], begin: int, many: int, start: int, span: int) -> None:
    base = Base("b", "bfloat16", 2, tuple(lengths), (View("w", (span,), start, span),))
    before = planner._entries(base, Slice(0, begin, begin + many, 64), 1000)
    parts, first = [], 0
    for rank, length in enumerate(lengths):
        if (held := min(begin + many, length) - begin) > 0:
            parts.append(Run(rank * 1000 + 64, 2 * (first + begin), 2 * held))
        first += length
    found = [run for _, run in Partition(parts).meet(Run(2 * start, 0, 2 * span))]
    assert [(p.offset, p.target, p.nbytes) for entry in before for p in entry.pieces] == [
        (run.source, run.target, run.width) for run in found
    ]


@settings(max_examples=500, deadline=None)
@given(tiled(), runs(), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_direct(parts: list[tuple[int, int]], run: Run, held: int, grow: int) -> None:
    """Of blocks of which all bytes are told; ``held`` bytes lie there for each byte, ``grow`` are read for each."""
    filled, at = [], 0
    for first, size in parts:  # without gaps
        filled.append((at, size + first - at))
        at = first + size
    filled.append((at, 400))
    if held == grow == 2:
        return
    rows = [(first, size, 0, 9000 * i, held) for i, (first, size) in enumerate(filled)]
    live = Live("k", (), (np.array(rows, dtype="<i8").tobytes(),))
    where = _Where(0, Manifest(((),), (1,), (1 << 20,)), [live], 0)
    run = doubled(run, (1, grow))
    block = Block(run.source, run.target, run.source, run.width // grow, run.count, run.source_stride,
                  run.target_stride, run.source_stride, grow=grow)  # fmt: skip
    if run.width % (2 * grow):
        return
    before = list(where.moved(block))
    step = held * grow
    found = []
    for number, part in Partition([Run(first, first, size) for first, size in filled]).meet(run, (1, grow)):
        first, _, _, source, _ = rows[number]
        found.append(replace(block, source=source + (part.source - first) * held, target=part.target,
                             width=part.width // grow, lines=part.count, source_stride=part.source_stride * held,
                             target_stride=part.target_stride))  # fmt: skip
    assert written(found, step) == written(before, step) and len(found) <= len(before)


def written(blocks: list[Block], step: int) -> list[tuple[int, int]]:
    return sorted(
        (block.source + i * block.source_stride + step * byte, block.target + i * block.target_stride + byte)
        for block in blocks
        for i in range(block.lines)
        for byte in range(block.width)
    )
