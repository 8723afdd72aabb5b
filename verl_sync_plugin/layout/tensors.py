# SPDX-License-Identifier: Apache-2.0
"""The unit of a sync: storages, tensors inside them, buckets, and one rank's shards. Imports no torch.

A *base* is one piece of storage that the trainer shards (an FSDP2 parameter, one inside an FSDP1 flat parameter, a
replicated buffer): a flat array whose elements the ranks of a group own in consecutive runs. A *view* is a named HF
tensor inside a base. A *bucket* is what travels at a time: every rank fills a segment of ``stride`` bytes with its
runs, and the bucket is the segments one after another. So the layout is rank-major, and a tensor is the concatenation
of the pieces its owners sent. Of a *sharded* bucket each rank keeps its own segment only, and every engine rank reads
what it needs where it lies; another one is completed on every rank by broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from verl_sync_plugin.layout.strided import Run

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes; lets any dtype be viewed in place and 16-byte loads be used
# In names, by FSDP1, activation checkpointing and ``torch.compile``
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
SCALE_SUFFIX = "_scale_inv"  # after the name of a weight in fp8: its scales, as checkpoints name them
EMPTY_SHARE = Run(0, 0, 0)  # the share of a tensor of which a base holds no element


@dataclass(frozen=True)
class View:
    """One HF tensor inside a base, or (then it has shares) the part of one that lies in this base.

    Attributes:
        name, shape: of the whole HF tensor.
        start: its first element in the flat base; 0 with shares.
        span: base elements from its first to its last, inclusive; with shares the whole tensor's elements.
        strides: in elements, ``None`` when it is contiguous.
        shares: which elements of the base are which of the tensor; ``EMPTY_SHARE`` where it holds none.
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

    def first(self, rank: int) -> int:
        """The element that a rank's run begins with."""
        return sum(self.lengths[:rank]) if len(self.lengths) > 1 else 0

    def held(self, rank: int) -> int:
        """The elements of a rank's run."""
        return self.lengths[rank if len(self.lengths) > 1 else 0]


@dataclass(frozen=True)
class Slice:
    """Elements ``[begin, end)`` of every rank's run of a base, at byte ``offset`` of every rank's segment."""

    base: int
    begin: int
    end: int
    offset: int

    def count(self, base: Base, rank: int) -> int:
        """Counts the elements that a rank has; not positive when its run ends before."""
        return min(self.end, base.held(rank)) - self.begin


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
    """One transfer: ``world`` segments of ``stride`` bytes. ``world`` is 1 when every rank holds all of it. ``first``:
    the bytes of all buckets before it, from which the places of a hash count."""

    world: int
    stride: int
    slices: tuple[Slice, ...]
    entries: tuple[Entry, ...]
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.world * self.stride

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """Indices of the bases of which the bucket holds something."""
        return tuple(dict.fromkeys(part.base for part in self.slices))


@dataclass(frozen=True)
class Plan:
    """All buckets of one sync, the same on every rank, in the order in which they travel; ``digest`` names the plan. If
    ``sharded``, segments stay with their ranks, else every rank gets whole buckets."""

    bases: tuple[Base, ...]
    buckets: tuple[Bucket, ...]
    digest: str
    sharded: bool = False

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def slot_bytes(self) -> int:
        """The most that a rank stages of one bucket, so the size of one staging slot."""
        return max((bucket.stride * (1 if self.sharded else bucket.world) for bucket in self.buckets), default=0)

    def origin(self, bucket: Bucket, rank: int) -> int:
        """The byte of a bucket that a rank's segment begins with, or its slot where that has all segments."""
        return rank * bucket.stride if self.sharded and bucket.world > 1 else 0

    @cached_property
    def names(self) -> frozenset[str]:
        """All tensors, tied ones under each of their names."""
        return frozenset(view.name for base in self.bases for view in base.views)


def align(nbytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParameterName:
    """One name of the parameter that a base holds, before verl's rewriting into HF tensors: ``shape`` of the whole
    parameter, ``strides`` in elements (``None``: its elements lie in the order of their indices)."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class Fill(Protocol):
    """Writes slices of several shards at once."""

    def __call__(
        self, segment: int, slices: Sequence[Slice], hashed: tuple[Mapping[str, int], torch.Tensor] | None = None
    ) -> Sequence[Slice]:
        """Starts to write ``slices`` into the segment at an address; or, with ``hashed`` (numbers by name, and sums),
        only adds their hashes to the sums. Returns the slices that the caller must pack."""


# Not frozen: thousands are made in every sync, and that would take three times as long
@dataclass(slots=True, eq=False)
class Shard:
    """One base with access to this rank's run of it. Never changed.

    Attributes:
        base: equal on all ranks of the group.
        local: returns this rank's run, 1-D, in the trainer's dtype and on the trainer's device (host memory when
            parameters are offloaded). It aliases the live parameter: read it, never write it.
        merge: ``merge(part, begin)`` turns the elements from ``begin`` on, on the device, into what travels; the next
            call overwrites what it returns. ``None``: the run travels as it is.
        members: the names of the parameter in the base, several where it is tied. Buffers have none.
        run: the memory of what ``local`` returns, perhaps in another shape, which the kernel reads where it lies.
            ``None``, where ``local`` makes a copy: torch packs that.
        fill: starts to write slices of such shards into a segment at once; see ``Fill``.
    """

    base: Base
    local: Callable[[], torch.Tensor]
    merge: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    members: tuple[ParameterName, ...] = ()
    run: torch.Tensor | None = None
    fill: Fill | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes ``[first, end)`` of a bucket that lie in one segment. ``names`` are the tensors that hold them,
    in the bucket's order; several where weights are tied, and then the first one's hash counts them. ``equal``: each
    holds all of these bytes."""

    first: int
    end: int
    names: tuple[str, ...]
    equal: bool = True


def numbers_of(buckets: Iterable[Sequence[Entry]]) -> dict[str, int]:
    """The tensors of a sync, numbered in the order of their names; the same for every plan of them."""
    names = sorted({entry.name for entries in buckets for entry in entries})
    return {name: number for number, name in enumerate(names)}


def extents_of(entries: Sequence[Entry], low: int = 0, high: float = math.inf) -> list[Extent]:
    """The bytes of a bucket that belong to any tensor, disjoint and in ascending order; only those of the segment
    ``[low, high)``, if given."""
    spans = sorted(
        (first, end, place)
        for place, entry in enumerate(entries)
        for piece in entry.pieces
        if low <= piece.source < high
        for first, end in piece.sources()
    )
    overlapping, reached = list[list[tuple[int, int, int]]](), -1
    for span in spans:
        if span[0] >= reached:
            overlapping.append([])
        overlapping[-1].append(span)
        reached = max(reached, span[1])
    extents = []
    for group in overlapping:
        names = dict.fromkeys(entries[place].name for place in sorted({place for *_, place in group}))
        equal = len({(first, end) for first, end, _ in group}) == 1
        extents.append(Extent(group[0][0], max(end for _, end, _ in group), tuple(names), equal))
    return extents


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a plan, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def clean_name(name: str) -> str:
    """A module or parameter name without the segments that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that lie in the same place in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
