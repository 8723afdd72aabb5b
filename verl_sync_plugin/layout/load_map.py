# SPDX-License-Identifier: Apache-2.0
"""Maps the tensors of a sync to one engine rank's memory: one table, and everything that follows from it. No torch.

The engine rank finds it out once (``engine/introduce.py``). Moves are in elements, so they hold for any dtype. Tensors
are numbered in the order of their names.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain

import msgspec
import numpy as np

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Entry, extents_of, numbers_of

Spans = np.ndarray  # int64 of shape (n, 2): first and one past the last, disjoint and ascending
Pairs = tuple[tuple[int, int], ...]  # the same, to be sent
EMPTY_SPANS: Spans = np.zeros((0, 2), dtype=np.int64)
ROUNDED = "is kept in several dtypes"
UNEVEN = "the engine's ranks hold parts of it that cannot be compared together"
MOST_TIMES = 1 << 20  # counts of one element in a sum; the hash is exact up to 2^32


class Box(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Elements that one ``copy_`` of two views moves from a tensor to memory.

    Attributes:
        source, target: the first element on either side.
        dims: size, step in the tensor and step in the memory, outer dimension first, joined where they follow on.
    """

    source: int
    target: int
    dims: tuple[tuple[int, int, int], ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(size for size, _, _ in self.dims)

    @property
    def width(self) -> int:
        """Elements of a run, consecutive on both sides."""
        return self.dims[-1][0] if self.dims and self.dims[-1][1:] == (1, 1) else 1

    @property
    def run_count(self) -> int:
        """Number of ``Run`` it makes; each covers at most two dimensions."""
        return math.prod(size for size, _, _ in (self.dims[:-1] if self.width > 1 else self.dims)[:-1])

    def runs(self, size: int) -> list[Run]:
        """The same as runs of bytes, of elements of ``size`` bytes."""
        dims = list(self.dims)
        width = dims.pop()[0] if self.width > 1 else 1
        count, step, other = dims.pop() if dims else (1, 0, 0)
        sources = starts_of(self.source, [(many, step) for many, step, _ in dims]).tolist()
        targets = starts_of(self.target, [(many, other) for many, _, other in dims]).tolist()
        return [Run(a, b, width, count, step, other).in_bytes(size) for a, b in zip(sources, targets, strict=True)]

    def packed(self) -> Box:
        """The same elements of the tensor, in its order, one after the other from 0 on."""
        dims, step = list[tuple[int, int, int]](), 1
        for size, source, _ in reversed(self.dims):
            dims.append((size, source, step))
            step *= size
        return Box(self.source, 0, tuple(joined(reversed(dims))))

    def source_only(self) -> Box:
        """The box without its place in memory, to compare which elements of the tensor are taken."""
        return Box(self.source, 0, tuple((size, step, 0) for size, step, _ in self.dims))


def joined(dims: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dimensions as in ``Box``, as few as they can be."""
    found: list[tuple[int, int, int]] = []
    for size, step, other in dims:
        if found and found[-1][1:] == (size * step, size * other):
            found[-1] = (found[-1][0] * size, step, other)
        else:
            found.append((size, step, other))
    return found


def box_of(shape: Sequence[int], steps: Sequence[int], others: Sequence[int], source: int, target: int) -> Box:
    """The box of a copy between two views of one shape: strides in the tensor (``steps``) and in the memory, and the
    first element on either side."""
    dims = [each for each in zip(shape, steps, others, strict=True) if each[0] != 1]
    return Box(source, target, tuple(joined(sorted(dims, key=lambda d: (-d[1], -d[2])))))


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One ``copy_`` of the model's load; ``dtype`` is that of the elements in the model."""

    tensor: int
    storage: int
    dtype: str
    box: Box


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that hold the same whatever is loaded; ``bits`` is one element, which repeats."""

    storage: int
    spans: Pairs
    bits: bytes


class StateTensor(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or persistent buffer, which a sync has to write."""

    name: str
    dtype: str
    box: Box
    buffer: bool


class Storage(msgspec.Struct, frozen=True, array_like=True):
    """A storage of the model, named after the first tensor in it."""

    name: str
    tensors: tuple[StateTensor, ...]


class NotCopied(msgspec.Struct, frozen=True, array_like=True):
    """A tensor with which the model's own load does more than copy it.

    Attributes:
        tensor: its number.
        why: in words.
        dtype: the widest that the load could use; empty for whatever the trainer has.
        takes: which elements the load takes.
    """

    tensor: int
    why: str
    dtype: str
    takes: Pairs


class LoadMap(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Attributes:
    model: engine and class, such as "SGLang's LlamaForCausalLM".
    storages: the storages of the model.
    moves: what a load copies; of a tensor in ``not_copied`` too, where its marks were found unchanged in the model.
    constants: what a sync writes in addition.
    own_load: why a sync leaves all tensors to the model's own load; empty where it copies them.
    not_copied: the tensors that are no mere copies.
    own_writes: what the own load writes: storage, and spans of bytes.
    skipped: tensors that the model rightly leaves alone, and why.
    unplaced: tensors of which it is not known where they lie after a load, and why.
    derives: the model computes something from parameters after a load.
    fp8: tensors that the model keeps in fp8 and was sent in another dtype, with rows and columns of a block. The map
        then says nothing else: they have to be sent quantized.
    """

    model: str = ""
    storages: tuple[Storage, ...] = ()
    moves: tuple[Move, ...] = ()
    constants: tuple[Constant, ...] = ()
    why_own_load: str = ""
    not_copied: tuple[NotCopied, ...] = ()
    own_writes: tuple[tuple[int, Pairs], ...] = ()
    skipped: tuple[tuple[int, str], ...] = ()
    unplaced: tuple[tuple[int, str], ...] = ()
    derives: bool = False
    fp8: tuple[tuple[int, int, int], ...] = ()

    @cached_property
    def copied(self) -> tuple[Move, ...]:
        """The moves of tensors that are mere copies."""
        others = {each.tensor for each in self.not_copied}
        return tuple(move for move in self.moves if move.tensor not in others)

    def not_held(self, dtypes: Sequence[str]) -> dict[int, str]:
        """The tensors that cannot be compared with what lies in the model after a load, and why; ``dtypes`` are those
        in which tensors travel, by number."""
        narrow = (move.tensor for move in self.moves if size_of(move.dtype) < size_of(dtypes[move.tensor]))
        return dict(self.unplaced) | dict.fromkeys(narrow, ROUNDED)

    @cached_property
    def digest(self) -> str:
        """Names the map."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


@cache
def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return max(int((re.findall(r"\d+", dtype) or [8])[0]) // 8, 1)


# ------------------------------------------------------------------------------------------------------- spans
def spans_of(found: Sequence[np.ndarray]) -> Spans:
    """The union of intervals."""
    pairs = np.concatenate([EMPTY_SPANS, *(np.asarray(each, dtype=np.int64).reshape(-1, 2) for each in found)])
    if len(pairs) < 2:
        return pairs
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reached = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate(([True], pairs[1:, 0] > reached[:-1]))
    return np.stack((pairs[first, 0], reached[np.concatenate((first[1:], [True]))]), 1)


def without(one: Spans, other: Spans) -> Spans:
    """``one`` minus ``other``."""
    edges = np.unique(np.concatenate((one, other)))
    keep = (_times_within(one, edges) > 0) & (_times_within(other, edges) == 0)
    return spans_of([np.stack((edges[:-1][keep], edges[1:][keep]), 1)])


def _times_within(intervals: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Counts for every two neighbouring edges the intervals, in any order, that reach from the one to the other."""
    begun, ended = (np.searchsorted(np.sort(intervals[:, side]), edges[:-1], "right") for side in (0, 1))
    return begun - ended


def length(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def pairs_of(spans: Spans) -> Pairs:
    return tuple((first, end) for first, end in spans.tolist())


def box_spans(box: Box, of_source: bool, size: int = 1) -> np.ndarray:
    """The elements of a box on one side, times ``size``; int64 of shape ``(n, 2)``, perhaps some of them twice."""
    first = (box.source if of_source else box.target) * size
    side, width, outer = 1 if of_source else 2, size, list[tuple[int, int]]()
    for many, step in sorted(((d[0], d[side] * size) for d in box.dims if d[side]), key=lambda d: d[1]):
        if step == width and not outer:
            width *= many
        else:
            outer.append((many, step))
    if 0 in (d[0] for d in box.dims):
        return EMPTY_SPANS
    starts = starts_of(first, outer)
    return np.stack((starts, starts + width), 1)


def starts_of(first: int, dims: Iterable[tuple[int, int]]) -> np.ndarray:
    """Lists where the rows of some memory begin, by the sizes and steps of its outer dimensions, outermost first."""
    starts = np.array([first], dtype=np.int64)
    for many, step in dims:
        starts = (starts[:, None] + np.arange(many, dtype=np.int64) * step).ravel()
    return starts


def full_box(shape: Sequence[int], strides: Sequence[int] | None) -> Box:
    """All elements of a tensor, in its own order."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))] if strides is None else strides
    return box_of(shape, strides, strides, 0, 0)


# ------------------------------------------------------------------------------------- what follows from the map
def unused(
    entries: Mapping[str, Entry], owners: Mapping[int, int], maps: Sequence[LoadMap]
) -> list[tuple[int, int, int]]:
    """Tensors of which the ranks of one engine together leave something alone, and may not.

    Args:
        entries: of the tensors, by name, in order.
        owners: ``owners_of``: tied tensors are used together.
        maps: of all ranks of the engine.

    Returns:
        Number, unused bytes and all bytes of each.
    """
    takes: dict[int, set[Box | Pairs]] = {}
    for found in maps:
        for move in found.moves:
            takes.setdefault(owners[move.tensor], set()).add(move.box.source_only())
        for left in found.not_copied:
            takes.setdefault(owners[left.tensor], set()).add(left.takes)
    skipped = {number for found in maps for number, _ in found.skipped}
    known: dict[object, tuple[int, int]] = {}  # a model of thousands of tensors has a few kinds of them
    missing = []
    for number, entry in enumerate(entries.values()):
        kind = entry.shape, entry.strides, frozenset(takes.get(owners[number], ()))
        if kind not in known:
            whole = spans_of([box_spans(full_box(entry.shape, entry.strides), True)])
            parts = [box_spans(t, True) if isinstance(t, Box) else np.array(t) for t in kind[2]]
            known[kind] = length(without(whole, spans_of(parts))), length(whole)
        lacking, total = known[kind]
        if lacking and number not in skipped:
            missing.append((number, lacking * size_of(entry.dtype), total * size_of(entry.dtype)))
    return missing


def unwritten(found: LoadMap) -> list[tuple[StateTensor, int, int]]:
    """The parameters and persistent buffers of the model that a sync does not write whole: how many elements it writes,
    and how many there are."""
    written: list[list[np.ndarray]] = [[] for _ in found.storages]
    for move in found.moves:
        written[move.storage].append(box_spans(move.box, False, size_of(move.dtype)))
    for number, spans in (*found.own_writes, *((each.storage, each.spans) for each in found.constants)):
        written[number].append(np.array(spans))
    missing = []
    for storage, parts in zip(found.storages, written, strict=True):
        union = spans_of(parts)
        for tensor in storage.tensors:
            size = size_of(tensor.dtype)
            rest = -(-length(without(spans_of([box_spans(tensor.box, False, size)]), union)) // size)
            if rest:
                missing.append((tensor, tensor.box.numel - rest, tensor.box.numel))
    return missing


def wire_dtypes(names: Sequence[str], maps: Iterable[LoadMap]) -> dict[str, str]:
    """The widest dtype in which any engine rank keeps each tensor, or could use it; empty for whatever the trainer has.
    Tensors that none of them takes are not in it."""
    found: dict[int, str] = {}
    of_each = (chain[Move | NotCopied](each.moves, each.not_copied) for each in maps)
    for number, dtype in dict.fromkeys((part.tensor, part.dtype) for parts in of_each for part in parts):
        found[number] = max(found.get(number, dtype), dtype, key=lambda each: size_of(each) if each else math.inf)
    return {names[number]: dtype for number, dtype in found.items()}


def owners_of(buckets: Sequence[Sequence[Entry]]) -> dict[int, int]:
    """Under whose number the bytes of each tensor are counted: tied ones share them, and travel once. Raises ValueError
    for tensors that share only some of their bytes, or lay them out otherwise."""
    numbers, layouts = numbers_of(buckets), dict[str, tuple[object, ...]]()
    for entry in (entry for entries in buckets for entry in entries):
        layouts[entry.name] = entry.dtype, entry.shape, entry.strides
    owners: dict[str, str] = {}
    for extent in (extent for entries in buckets for extent in extents_of(entries)):
        owner, names = extent.names[0], extent.names
        alike = extent.equal and len({layouts[name] for name in names}) == 1
        if not alike or any(owners.setdefault(name, owner) != owner for name in names):
            raise ValueError(f"{', '.join(names)}: tensors that share bytes have to share all of them, in one layout")
    return {number: numbers[owners.get(name, name)] for name, number in numbers.items()}


class Tensors:
    """The tensors of a plan.

    Attributes:
        numbers: of each name; see ``numbers_of``.
        names, dtypes, numels: by number.
        entries: by name, in the order in which they travel; of some bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[Entry]]) -> None:
        self._buckets = buckets
        self.numbers = numbers_of(buckets)
        self.names = list(self.numbers)
        self.entries = {entry.name: entry for entries in buckets for entry in entries}
        self.dtypes = [self.entries[name].dtype for name in self.names]
        self.numels = [self.entries[name].nbytes // size_of(self.entries[name].dtype) for name in self.names]

    @cached_property
    def owners(self) -> dict[int, int]:
        return owners_of(self._buckets)


HashedPart = tuple[int, Box | None]  # number of the tensor, and its elements; ``None``: all of its bytes


def read_parts(found: LoadMap, owners: Mapping[int, int]) -> list[HashedPart]:
    """Lists what an engine rank hashes of what it reads, in the order of its sums: every move, and every tensor that is
    no mere copy."""
    parts: list[HashedPart] = [(owners[move.tensor], move.box) for move in found.copied]
    return parts + [(number, None) for number in sorted({owners[each.tensor] for each in found.not_copied})]


def held_parts(found: LoadMap, dtypes: Sequence[str]) -> list[Move]:
    """Lists what an engine rank hashes in its parameters after a sync, in the order of its sums. ``dtypes``: as for
    ``not_held``."""
    left_out = found.not_held(dtypes)
    return [move for move in found.moves if move.tensor not in left_out]


def hash_factors(numels: Sequence[int], everyone: Sequence[Sequence[HashedPart]]) -> tuple[list[int], list[list[int]]]:
    """Weighs every part so that one sum over all ranks compares all copies of all elements of a tensor. ``numels`` are
    the elements of each tensor, and ``everyone`` are the parts of each rank.

    Returns:
        How often the elements of each tensor count then, 0 where nobody has any and -1 where they cannot be counted
        alike; and the factor of each part of each rank.
    """
    of_tensor: dict[int, list[tuple[int, int]]] = {}
    for rank, parts in enumerate(everyone):
        for place, (number, _) in enumerate(parts):
            of_tensor.setdefault(number, []).append((rank, place))
    times, factors = [0] * len(numels), [[0] * len(parts) for parts in everyone]
    known: dict[object, tuple[int, tuple[int, ...]]] = {}
    for number, places in of_tensor.items():
        boxes = tuple(None if (box := everyone[r][p][1]) is None else box.source_only() for r, p in places)
        kind = numels[number], boxes
        if kind not in known:
            known[kind] = balance(numels[number], boxes)
        times[number], of_parts = known[kind]
        if times[number] < 0 and None in boxes:  # then those that hash it whole
            times[number], of_parts = boxes.count(None), tuple(int(box is None) for box in boxes)
        for (rank, place), factor in zip(places, of_parts, strict=True):
            factors[rank][place] = factor
    return times, factors


def balance(numel: int, boxes: Sequence[Box | None]) -> tuple[int, tuple[int, ...]]:
    """``hash_factors`` for the parts of one tensor on all ranks; -1 and zeros where no part has some element, or the
    elements of one part are held unequally often."""
    nothing = -1, (0,) * len(boxes)
    spans = [np.array([[0, numel]]) if box is None else box_spans(box, True) for box in boxes]
    edges = np.unique(np.concatenate([EMPTY_SPANS, *spans]))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != numel:
        return nothing
    held = _times_within(np.concatenate(spans), edges)
    times = math.lcm(*map(int, np.unique(held))) if held.min() > 0 else 0
    if not 0 < times <= MOST_TIMES:
        return nothing
    factors = []
    for span in spans:
        of_part = np.unique(held[_times_within(span, edges) > 0])
        if len(of_part) > 1:
            return nothing
        factors.append(times // int(of_part[0]) if len(of_part) else 0)
    return times, tuple(factors)
