"""Cuts a model into buckets: which bytes of which shard travel together, and where they land. Pure; imports no torch.

A *base* is one piece of storage that the trainer shards (an FSDP2 parameter, an FSDP1 flat parameter, or a replicated
buffer): a flat array whose elements the ranks of a group own in consecutive runs. A *view* is a named HF tensor inside
a base. A *bucket* is what one all-gather moves: every rank fills a segment of ``stride`` bytes with its runs, and the
gathered bucket is the segments one after another. So the wire layout is rank-major, a tensor is the concatenation of
the pieces its owners sent, and an all-gather needs no second buffer and no copy afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

ALIGNMENT = 16  # bytes; lets any dtype be viewed in place and 16-byte loads be used


@dataclass(frozen=True)
class Share:
    """``count`` times ``run`` elements: those from ``start + i * step`` of the base on are those from ``target +
    i * stride`` of the tensor on. Runs do not overlap."""

    start: int
    target: int
    run: int
    count: int = 1
    step: int = 0
    stride: int = 0


@dataclass(frozen=True)
class View:
    """One HF tensor inside a base, or the part of one that lies in this base (then it has shares).

    Attributes:
        name: HF parameter name.
        shape: full shape.
        start: first element of the tensor in the flat base; 0 with shares.
        span: base elements from the tensor's first to its last, inclusive; with shares the whole tensor's elements.
        strides: strides in elements, ``None`` when the tensor is contiguous.
        shares: of a tensor that several bases make up (see ``joint.py``), what this base holds.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    span: int
    strides: tuple[int, ...] | None = None
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True)
class Base:
    """One sharded storage.

    Attributes:
        key: unique name for messages.
        dtype: wire dtype, for example ``bfloat16``.
        itemsize: bytes per element on the wire.
        lengths: elements owned by each rank of the group, in order; one entry when every rank holds all of it.
        views: the HF tensors inside.
    """

    key: str
    dtype: str
    itemsize: int
    lengths: tuple[int, ...]
    views: tuple[View, ...]

    @property
    def numel(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Slice:
    """Elements ``[begin, end)`` of every rank's run of a base, at byte ``offset`` of every rank's segment."""

    base: int
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Piece:
    """``count`` times ``nbytes`` bytes: those from ``offset + i * step`` of the bucket on are those from
    ``target + i * stride`` of the tensor on."""

    offset: int
    nbytes: int
    target: int
    count: int = 1
    step: int = 0
    stride: int = 0

    def spans(self) -> Iterator[tuple[int, int]]:
        """The bytes of the bucket, (first, one past the last)."""
        if self.count == 1 or self.step == self.nbytes:
            yield self.offset, self.offset + self.nbytes * self.count
            return
        for piece in self.repeats():
            yield piece.offset, piece.offset + piece.nbytes

    def repeats(self) -> Iterator[Piece]:
        """The same as pieces that do not repeat."""
        for index in range(self.count):
            yield Piece(self.offset + index * self.step, self.nbytes, self.target + index * self.stride)


@dataclass(frozen=True)
class Entry:
    """What one bucket holds of one tensor; ``nbytes`` counts the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Bucket:
    """One transfer: ``world`` segments of ``stride`` bytes. ``world`` is 1 when nothing needs gathering."""

    world: int
    stride: int
    slices: tuple[Slice, ...]
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return self.world * self.stride


@dataclass(frozen=True)
class Plan:
    """All buckets of one sync, the same on every rank."""

    bases: tuple[Base, ...]
    buckets: tuple[Bucket, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def slot_bytes(self) -> int:
        """Size of the largest bucket, so of one staging slot."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @cached_property
    def tensor_count(self) -> int:
        return len({view.name for base in self.bases for view in base.views})


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_buckets(bases: tuple[Base, ...], bucket_bytes: int) -> Plan:
    """Plans the sync.

    Args:
        bases: in the order of the model; bases with more than one owner must all have the same number of owners.
        bucket_bytes: upper bound on a gathered bucket; a base that does not fit is split over several buckets.

    Raises:
        ValueError: the bucket is too small to hold 16 bytes per rank, or two views have the same name.
    """
    _check_names(bases)
    worlds = {len(base.lengths) for base in bases} - {1}
    assert len(worlds) <= 1, f"bases are sharded over groups of different sizes: {sorted(worlds)}"
    buckets: list[Bucket] = []
    for world in [*sorted(worlds), 1]:
        capacity = bucket_bytes // world // ALIGNMENT * ALIGNMENT
        if capacity < ALIGNMENT:
            raise ValueError(
                f"bucket of {bucket_bytes} bytes cannot serve {world} ranks with {ALIGNMENT} bytes each; "
                "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
            )
        chosen = [index for index, base in enumerate(bases) if len(base.lengths) == world]
        buckets.extend(_seal(bases, slices, world) for slices in _cut(bases, chosen, capacity))
    digest = hashlib.sha256(repr((bases, bucket_bytes)).encode()).hexdigest()
    return Plan(bases, tuple(buckets), digest)


def _check_names(bases: tuple[Base, ...]) -> None:
    seen: set[str] = set()
    for base in bases:
        for view in base.views:
            if view.name in seen:
                raise ValueError(f"two tensors of the trainer's model are both named {view.name!r}")
            seen.add(view.name)


def _cut(bases: tuple[Base, ...], chosen: list[int], capacity: int) -> list[list[Slice]]:
    """Fills buckets one after another; a base is split only when it is larger than a whole bucket."""
    buckets: list[list[Slice]] = []
    current: list[Slice] = []
    used = 0
    for index in chosen:
        base = bases[index]
        longest = max(base.lengths)
        if longest == 0:
            continue
        if current and used + longest * base.itemsize > capacity:
            buckets.append(current)
            current, used = [], 0
        step = _step(base, capacity)
        for begin in range(0, longest, step):
            end = min(begin + step, longest)
            if current and used + (end - begin) * base.itemsize > capacity:
                buckets.append(current)
                current, used = [], 0
            current.append(Slice(index, begin, end, used))
            used = align(used + (end - begin) * base.itemsize)
    if current:
        buckets.append(current)
    return buckets


def _step(base: Base, capacity: int) -> int:
    """Elements of each run per bucket: whole views where they tile the runs (fused experts), else what fits."""
    fits = max(capacity // base.itemsize, 1)
    spans = {view.span for view in base.views}
    if len(spans) == 1:
        span = spans.pop()
        if span <= fits and all(length % span == 0 for length in base.lengths):
            return fits // span * span
    return fits


def _seal(bases: tuple[Base, ...], slices: list[Slice], world: int) -> Bucket:
    last = slices[-1]
    stride = align(last.offset + (last.end - last.begin) * bases[last.base].itemsize)
    entries = tuple(entry for part in slices for entry in _entries(bases[part.base], part, stride))
    return Bucket(world, stride, tuple(slices), entries)


def _entries(base: Base, part: Slice, stride: int) -> list[Entry]:
    """The tensors that have bytes in this slice, with their pieces in ascending target order."""
    starts = [0, *accumulate(base.lengths)]
    runs = []  # (first element in the base, one past the last, byte offset in the bucket)
    for rank, length in enumerate(base.lengths):
        first, stop = starts[rank] + part.begin, starts[rank] + min(part.end, length)
        if first < stop:
            runs.append((first, stop, rank * stride + part.offset))
    size = base.itemsize
    entries = []
    for view in base.views:
        pieces = []
        for first, stop, offset in runs:
            low, high = max(first, view.start), min(stop, view.start + view.span)
            if low < high:
                piece = Piece(offset + (low - first) * size, (high - low) * size, (low - view.start) * size)
                pieces.append(piece)
        if pieces:
            entries.append(Entry(view.name, base.dtype, view.shape, view.strides, view.span * size, tuple(pieces)))
    return entries
