"""Lines inside repeating pieces: the same bytes as cutting every repetition by itself."""

from __future__ import annotations

import random

import torch

from verl_sync_plugin.copies.blocks import Lines, clip
from verl_sync_plugin.layout.tensors import Entry, Piece
from verl_sync_plugin.receiver.copy_plan import Planned
from verl_sync_plugin.receiver.cuts import scattered
from verl_sync_plugin.receiver.rows import in_step, row_by_row


def moves(parts: list[Lines]) -> list[tuple[int, int]]:
    """(byte of the bucket, byte of the target) of everything copied; twice as many bytes are written as read."""
    return sorted(
        (part.start + line * part.stride + byte, part.target + line * part.target_stride + 2 * byte)
        for part in parts
        for line in range(part.count)
        for byte in range(part.width)
    )


def one_by_one(lines: Lines, piece: Piece) -> list[Lines]:
    found = []
    for single in piece.repeats():
        for part in clip(lines, single.target, single.target + single.nbytes, (2, 1)):
            shifted = (part.start + single.offset - single.target, part.width, part.count, part.stride)
            found.append(Lines(*shifted, part.target, part.target_stride))
    return found


def test_any_columns() -> None:
    generator, seen = random.Random(3), 0
    for _ in range(2000):
        pitch = generator.randint(4, 12)
        nbytes = generator.randint(1, pitch)
        piece = Piece(
            generator.randint(0, 40),
            nbytes,
            generator.randint(0, 2 * pitch),
            generator.randint(1, 5),
            nbytes + generator.choice([0, 0, 3]),
            pitch,
        )
        if generator.random() < 0.5:
            start, width, count = generator.randint(0, 3 * pitch), generator.randint(1, pitch), generator.randint(2, 6)
            lines = Lines(start, width, count, pitch, 1000, 100)
        else:
            lines = Lines(generator.randint(0, 3 * pitch), generator.randint(1, 6 * pitch), 1, 0, 1000, 0)
        if piece.count == 1 or not in_step(lines, piece):
            continue
        found = list(row_by_row(lines, piece, (2, 1)))
        assert moves(found) == moves(one_by_one(lines, piece)), (lines, piece)
        assert len(found) <= 6, "not one per row"
        seen += bool(found)
    assert seen > 300


def test_out_of_step() -> None:
    assert not in_step(Lines(0, 4, 3, 9, 0, 8), Piece(0, 4, 0, 3, 4, 8))


def test_columns_of_a_tall_matrix_are_not_scattered() -> None:
    """Half the columns of 4096 rows, to an engine rank that takes half or all of them; crosswise they are."""
    entry = Entry("w", "bfloat16", (4096, 64), None, 4096 * 128, (Piece(0, 64, 0, 4096, 64, 128),))
    columns, everything = Lines(64, 64, 4096, 128, 0, 64), Lines(0, 4096 * 128, 1, 0, 0, 0)
    crosswise = Lines(0, 32, 8192, 64, 0, 32)
    for lines, expected in ((columns, set()), (everything, set()), (crosswise, {"w"})):
        planned = {"w": Planned(torch.bfloat16, torch.bfloat16, (lines,))}
        assert scattered((entry,), planned) == expected
