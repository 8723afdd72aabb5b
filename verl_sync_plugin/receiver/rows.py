"""Recorded lines inside a piece that repeats: columns of a matrix that arrive row by row. Pure; imports no torch.

A tensor-parallel shard of a matrix cut along its second dimension arrives as one run per row of the matrix. Where the
engine's lines follow the same rows, their common part is again one run per row: a single strided copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_sync_plugin.copies.blocks import Lines
from verl_sync_plugin.layout.tensors import Piece


def in_step(lines: Lines, piece: Piece) -> bool:
    """Whether lines and the repetitions of a piece follow the same rows, or the lines are one run."""
    return piece.count == 1 or lines.count == 1 or lines.stride == piece.stride


def row_by_row(lines: Lines, piece: Piece, grow: tuple[int, int]) -> Iterator[Lines]:
    """What lines and a repeating piece have in common.

    Args:
        lines: in step with the piece.
        piece: its repetitions do not overlap, neither in the bucket nor in the tensor.
        grow: bytes of the target per bytes of the source, as numerator and denominator.

    Returns:
        Lines whose ``start`` and ``stride`` are of the bucket.
    """
    for rows in [lines] if lines.count > 1 else _as_rows(lines, piece, grow):
        yield from _common(rows, piece, grow)


def _common(rows: Lines, piece: Piece, grow: tuple[int, int]) -> Iterator[Lines]:
    first = rows.start - piece.target  # of the first line, seen from the first repetition
    # Line number i + shift lies in repetition i, for the few shifts at which a line reaches into a repetition
    lowest = -((first + rows.width - 1) // piece.stride)
    highest = (piece.nbytes - 1 - first) // piece.stride
    for shift in range(lowest, highest + 1):
        at = first + shift * piece.stride
        begin, end = max(at, 0), min(at + rows.width, piece.nbytes)
        top, bottom = max(0, -shift), min(piece.count, rows.count - shift)
        if begin < end and top < bottom:
            source = piece.offset + top * piece.step + begin
            target = rows.target + (top + shift) * rows.target_stride + (begin - at) * grow[0] // grow[1]
            yield Lines(source, end - begin, bottom - top, piece.step, target, rows.target_stride)


def _as_rows(run: Lines, piece: Piece, grow: tuple[int, int]) -> Iterator[Lines]:
    """One run as lines of the piece's rows: whole ones, and what is left at either end."""
    pitch, end = piece.stride, run.start + run.width
    aligned = run.start + (piece.target - run.start) % pitch
    whole = max((end - aligned) // pitch, 0)
    tail = aligned + whole * pitch
    for start, width, count in (
        (run.start, min(aligned, end) - run.start, 1),
        (aligned, pitch, whole),
        (tail, end - tail, 1),
    ):
        if width > 0 and count > 0:
            target = run.target + (start - run.start) * grow[0] // grow[1]
            yield Lines(start, width, count, pitch, target, pitch * grow[0] // grow[1])
