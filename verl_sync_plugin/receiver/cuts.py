"""What each bucket holds of a copy plan: recorded runs of tensors cut by the pieces in which the tensors arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from verl_sync_plugin.copies.blocks import Block, Lines, clip
from verl_sync_plugin.copies.hulls import Hull
from verl_sync_plugin.layout.tensors import Entry, Piece
from verl_sync_plugin.receiver.copy_plan import Planned
from verl_sync_plugin.receiver.rows import in_step, row_by_row

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
        fused: copies that hash what they copy.
        bare: copies that do not (another copy of the same bytes hashes them, or they are among ``reads``).
        reads: bytes hashed without a copy.
        casts: copies that change the dtype; their bytes are among ``reads``.
        owners: the tensor of each of ``fused`` and then ``bare``.
        leftovers: entries that take the model's own path.
    """

    fused: list[Block] = field(default_factory=list)
    bare: list[Block] = field(default_factory=list)
    reads: list[Block] = field(default_factory=list)
    casts: list[tuple[str, Cast]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    leftovers: tuple[Entry, ...] = ()

    def bytes_by_base(self, segment: int) -> Counter[int]:
        """The bytes read from each segment."""
        read: Counter[int] = Counter()
        for block in (*self.fused, *self.bare, *self.reads, *(cast.block for _, cast in self.casts)):
            read[block.base] += block.width * block.lines
        read.update(bytes_of(self.leftovers, segment))
        return read


def bytes_of(entries: Sequence[Entry], segment: int) -> Counter[int]:
    """The bytes that each segment holds of these tensors."""
    held: Counter[int] = Counter()
    for piece in (piece for entry in entries for piece in entry.pieces):
        held[piece.offset // segment] += piece.nbytes * piece.count
    return held


def scattered(entries: Sequence[Entry], planned: dict[str, Planned]) -> frozenset[str]:
    """Tensors that arrive in so many runs that a table of them would be larger than what it moves is worth."""
    runs: Counter[str] = Counter()
    for entry in entries:
        lines = planned[entry.name].lines if entry.name in planned else ()
        for piece in entry.pieces:
            runs[entry.name] += sum(1 if in_step(line, piece) else piece.count for line in lines)
    return frozenset(name for name, count in runs.items() if count > MOST_RUNS)


def cut(
    entries: tuple[Entry, ...],
    segment: int,
    hulls: Sequence[Hull],
    numbers: dict[str, int],
    planned: dict[str, Planned],
    chosen: dict[str, str],
) -> Work:
    """The work of one bucket.

    Args:
        entries: what the bucket holds.
        segment: bytes per segment; a block's ``base`` is its segment.
        hulls: of the bucket.
        numbers: of the tensors; a block's ``group`` is the one whose hash its bytes count for.
        planned: the plan by name; entries not in it are left over.
        chosen: see ``readings.choose``.
    """
    work = Work(leftovers=tuple(entry for entry in entries if entry.name not in planned))
    fused, bare = list[tuple[str, Block]](), list[tuple[str, Block]]()
    hashing = {chosen[hull.names[0]]: numbers[hull.names[0]] for hull in hulls if hull.names[0] in chosen}
    for entry in entries:
        plan = planned.get(entry.name)
        if plan is None:
            continue
        group = hashing.get(entry.name)
        for piece in entry.pieces:
            blocks = [(entry.name, block) for block in _blocks(plan, piece, piece.offset // segment, group or 0)]
            if plan.casts:
                work.casts.extend((name, Cast(block, plan)) for name, block in blocks)
            else:
                (bare if group is None else fused).extend(blocks)
    work.owners = [name for name, _ in (*fused, *bare)]
    work.fused, work.bare = [block for _, block in fused], [block for _, block in bare]
    work.reads = [
        Block(h.first, 0, h.first, h.end - h.first, base=h.first // segment, group=numbers[h.names[0]])
        for h in hulls
        if h.names[0] not in chosen
    ]
    return work


def _blocks(plan: Planned, piece: Piece, base: int, group: int) -> Iterator[Block]:
    """The plan's runs inside one piece, with offsets in the bucket as sources."""
    grow = (plan.target_dtype.itemsize, plan.dtype.itemsize)
    for lines in plan.lines:
        if piece.count == 1:
            parts = _inside(lines, piece, grow)
        elif in_step(lines, piece):
            parts = row_by_row(lines, piece, grow)
        else:
            parts = (part for single in piece.repeats() for part in _inside(lines, single, grow))
        for part in parts:
            if part.count > 1 and part.stride == part.width and part.target_stride == part.width and not plan.casts:
                yield Block(part.start, part.target, part.start, part.width * part.count, base=base, group=group)
            else:
                strides = (part.stride, part.target_stride, part.stride)
                yield Block(
                    part.start, part.target, part.start, part.width, part.count, *strides, base=base, group=group
                )


def _inside(lines: Lines, piece: Piece, grow: tuple[int, int]) -> Iterator[Lines]:
    """The lines in a piece that does not repeat; ``start`` and ``stride`` then are of the bucket."""
    shift = piece.offset - piece.target
    for part in clip(lines, piece.target, piece.target + piece.nbytes, grow):
        yield replace(part, start=part.start + shift)
