# SPDX-License-Identifier: Apache-2.0
"""The unit of a sync: storages, tensors inside them, buckets. Imports no torch.

A *base* is one piece of storage that the trainer shards (an FSDP2 parameter, an FSDP1 flat parameter, or a replicated
buffer): a flat array whose elements the ranks of a group own in consecutive runs. A *view* is a named HF tensor inside
a base. A *bucket* is what travels at a time: every rank fills a segment of ``stride`` bytes with its runs, and the
bucket is the segments one after another. So the layout is rank-major, and a tensor is the concatenation of the pieces
its owners sent. Of a *sharded* bucket each rank keeps its own segment only, and every engine rank
reads what it needs where it lies; another one is completed on every rank by broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verl_sync_plugin.layout.strided import Run

ALIGNMENT = 16  # bytes; lets any dtype be viewed in place and 16-byte loads be used
NOTHING = Run(0, 0, 0)  # the share of a tensor of which a base holds no element


@dataclass(frozen=True)
class View:
    """One HF tensor inside a base, or (then it has shares) the part of one that lies in this base.

    Attributes:
        name, shape: of the whole HF tensor.
        start: its first element in the flat base; 0 with shares.
        span: base elements from its first to its last, inclusive; with shares the whole tensor's elements.
        strides: in elements, ``None`` when it is contiguous.
        shares: which elements of the base are which of the tensor; ``NOTHING`` where it holds none.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    span: int
    strides: tuple[int, ...] | None = None
    shares: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Pairs the base's elements with those of the tensor's memory."""
        return self.shares or (Run(self.start, 0, self.span),)


@dataclass(frozen=True)
class Base:
    """One sharded storage: a unique ``key`` for messages, dtype and bytes per element on the wire, the elements owned
    by each rank of the group (one entry when every rank holds all), and the HF tensors inside."""

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

    def count(self, base: Base, rank: int) -> int:
        """How many of these elements a rank has; not positive when its run ends before."""
        return min(self.end, base.lengths[rank if len(base.lengths) > 1 else 0]) - self.begin


@dataclass(frozen=True)
class Entry:
    """The part of one tensor in one bucket; ``nbytes`` counts the whole tensor. Its pieces say which bytes of the
    bucket are which of the tensor; each lies in one segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    pieces: tuple[Run, ...]


@dataclass(frozen=True)
class Bucket:
    """One transfer: ``world`` segments of ``stride`` bytes. ``world`` is 1 when every rank holds all of it."""

    world: int
    stride: int
    slices: tuple[Slice, ...]
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return self.world * self.stride

    def filled(self, bases: tuple[Base, ...], segment: int) -> int:
        """How many bytes of a segment its rank has something in; after them it has nothing."""
        ends = (
            part.offset + count * bases[part.base].itemsize
            for part in self.slices
            if (count := part.count(bases[part.base], segment)) > 0
        )
        return max(ends, default=0)

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """Indices of the bases of which the bucket holds something."""
        return tuple(dict.fromkeys(part.base for part in self.slices))


@dataclass(frozen=True)
class Plan:
    """All buckets of one sync, the same on every rank, in the order in which they travel; ``digest`` names the plan. If
    ``sharded``, segments stay with their ranks, else every rank gathers every bucket; ``held`` is the most segments of
    a bucket in one slot, more than one where ranks hold segments of other hosts."""

    bases: tuple[Base, ...]
    buckets: tuple[Bucket, ...]
    digest: str
    sharded: bool = False
    held: int = 1

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def slot_bytes(self) -> int:
        """The most that a rank stages of one bucket, so the size of one staging slot."""
        held = [min(self.held, bucket.world) if self.sharded else bucket.world for bucket in self.buckets]
        return max((number * bucket.stride for number, bucket in zip(held, self.buckets, strict=True)), default=0)

    def origin(self, bucket: Bucket, rank: int) -> int:
        """The byte of a bucket that a rank's segment begins with, or its slot where that has all segments."""
        return rank * bucket.stride if self.sharded and bucket.world > 1 else 0

    @cached_property
    def names(self) -> frozenset[str]:
        """All tensors, tied ones under each of their names."""
        return frozenset(view.name for base in self.bases for view in base.views)

    @property
    def tensor_count(self) -> int:
        return len(self.names)


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
