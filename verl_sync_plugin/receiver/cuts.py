# SPDX-License-Identifier: Apache-2.0
"""What each bucket holds of a copy plan: recorded runs of tensors cut by the pieces in which the tensors arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.hulls import Hull
from verl_sync_plugin.layout.strided import Run, compose, in_step
from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.copy_plan import Planned

MOST_RUNS = 512  # of one tensor in one bucket


@dataclass(frozen=True)
class Cast:
    """A block whose bytes change on the way: ``width`` counts the source's."""

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
            read[block.base] += block.width * block.count
        read.update(bytes_of(self.leftovers, segment))
        return read


def bytes_of(entries: Sequence[Entry], segment: int) -> Counter[int]:
    """The bytes that each segment holds of these tensors."""
    held: Counter[int] = Counter()
    for piece in (piece for entry in entries for piece in entry.pieces):
        held[piece.source // segment] += piece.width * piece.count
    return held


def scattered(entries: Sequence[Entry], planned: dict[str, Planned]) -> frozenset[str]:
    """Tensors that arrive in so many runs that a table of them would be larger than what it moves is worth."""
    runs: Counter[str] = Counter()
    for entry in entries:
        recorded = planned[entry.name].runs if entry.name in planned else ()
        for piece in entry.pieces:
            runs[entry.name] += sum(1 if in_step(piece, run) else piece.count for run in recorded)
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
            blocks = [(entry.name, block) for block in _blocks(plan, piece, piece.source // segment, group or 0)]
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


def _blocks(plan: Planned, piece: Run, base: int, group: int) -> Iterator[Block]:
    """The plan's runs inside one piece, with offsets in the bucket as sources."""
    scale = (plan.target_dtype.itemsize, plan.dtype.itemsize)
    for planned in plan.runs:
        for run in compose(piece, planned, scale):
            width, count, strides = run.width, run.count, (run.source_stride, run.target_stride, run.source_stride)
            if count > 1 and strides == (width, width, width) and not plan.casts:
                width, count, strides = width * count, 1, (0, 0, 0)
            yield Block(run.source, run.target, run.source, width, count, *strides, base=base, group=group)
