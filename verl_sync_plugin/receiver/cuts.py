"""What each bucket holds of a copy plan: recorded runs of tensors cut by the pieces in which the tensors arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verl_sync_plugin.bucket import Entry, Piece
from verl_sync_plugin.copies.blocks import Block, Interval, clip, union
from verl_sync_plugin.receiver.copy_plan import Planned

MOST_RUNS = 512  # of one tensor in one bucket


@dataclass(frozen=True)
class Cast:
    """A block whose bytes change on the way: ``width`` and ``lines`` in the source's bytes."""

    block: Block
    planned: Planned


@dataclass
class Work:
    """What one bucket asks for.

    Attributes:
        fused: copies that hash every byte of their piece once.
        bare: copies that do not (the rank needs part of a piece only, or another copy hashes it).
        reads: pieces hashed without a copy.
        casts: copies that change the dtype; their pieces are among ``reads``.
        owners: the tensor of each of ``fused`` and then ``bare``.
        leftovers: entries that take the model's own path.
    """

    fused: list[Block] = field(default_factory=list)
    bare: list[Block] = field(default_factory=list)
    reads: list[Block] = field(default_factory=list)
    casts: list[tuple[str, Cast]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    leftovers: tuple[Entry, ...] = ()


def scattered(entries: Sequence[Entry]) -> frozenset[str]:
    """Tensors that arrive in so many runs that a table of them would be larger than what it moves is worth."""
    return frozenset(e.name for e in entries if sum(piece.count for piece in e.pieces) > MOST_RUNS)


def covered(entries: Sequence[Entry]) -> list[Interval]:
    """The bytes of a bucket that belong to any tensor; none of the intervals crosses a segment."""
    return union(span for entry in entries for piece in entry.pieces for span in piece.spans())


def cut(entries: tuple[Entry, ...], segment: int, first_group: int, planned: dict[str, Planned]) -> Work:
    """The work of one bucket.

    Args:
        entries: what the bucket holds.
        segment: bytes per segment; each has its own sum, numbered from ``first_group``.
        first_group: see there.
        planned: the plan by name; entries not in it are left over.
    """
    work = Work(leftovers=tuple(entry for entry in entries if entry.name not in planned))
    hulls = set(covered(entries))
    fused: list[tuple[str, Block]] = []
    bare: list[tuple[str, Block]] = []
    for entry in entries:
        plan = planned.get(entry.name)
        if plan is None:
            continue
        whole = not plan.casts and _reads_all(plan, entry.nbytes)
        for piece in (single for arrived in entry.pieces for single in arrived.repeats()):
            hull = (piece.offset, piece.offset + piece.nbytes)
            group = first_group + piece.offset // segment
            blocks = [(entry.name, block) for block in _blocks(plan, piece, group)]
            if plan.casts:
                work.casts.extend((name, Cast(block, plan)) for name, block in blocks)
            elif whole and hull in hulls:
                hulls.discard(hull)
                fused.extend(blocks)
            else:
                bare.extend(blocks)
    work.owners = [name for name, _ in (*fused, *bare)]
    work.fused, work.bare = [block for _, block in fused], [block for _, block in bare]
    work.reads = [Block(low, 0, low, high - low, group=first_group + low // segment) for low, high in sorted(hulls)]
    return work


def _reads_all(plan: Planned, nbytes: int) -> bool:
    """Whether the copies read every byte of the tensor exactly once."""
    parts = [
        (line.start, line.start + line.width * line.count)
        for line in plan.lines
        if line.count == 1 or line.stride == line.width
    ]
    read = sum(end - first for first, end in parts)
    return len(parts) == len(plan.lines) and read == nbytes == sum(end - first for first, end in union(parts))


def _blocks(plan: Planned, piece: Piece, group: int) -> Iterator[Block]:
    """The plan's runs inside one piece, with offsets in the bucket as sources."""
    shift = piece.offset - piece.target
    grow = (plan.target_dtype.itemsize, plan.dtype.itemsize)
    for lines in plan.lines:
        for part in clip(lines, piece.target, piece.target + piece.nbytes, grow):
            start = part.start + shift
            if part.count > 1 and part.stride == part.width and part.target_stride == part.width and not plan.casts:
                yield Block(start, part.target, start, part.width * part.count, group=group)
            else:
                strides = (part.stride, part.target_stride, part.stride)
                yield Block(start, part.target, start, part.width, part.count, *strides, group=group)
