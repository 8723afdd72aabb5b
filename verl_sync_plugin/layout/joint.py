# SPDX-License-Identifier: Apache-2.0
"""Plans a model that ranks hold in different parts (tensor, pipeline, expert parallel). Pure; imports no torch.

Every base has one owner: it is one rank's local parameter. Owners fill their segments of a bucket independently of one
another, so a bucket carries different layers of different pipeline stages, different experts of different expert ranks,
and still is one transfer. Bases that make up the same tensors (the tensor-parallel shards of a parameter) travel in
the same bucket, so that the engine gets these tensors whole; only a parameter larger than a rank's segment is torn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby

from verl_sync_plugin.layout.planner import digest_of, segment_capacity
from verl_sync_plugin.layout.strided import Run, compose
from verl_sync_plugin.layout.tensors import Base, Bucket, Entry, Plan, Slice, align


@dataclass
class _Unit:
    """The bases of one parameter, of which the longest has ``numel`` elements; ``done`` of each have been placed."""

    bases: list[int]
    owners: list[int]
    numel: int
    itemsize: int
    done: int = 0

    @property
    def left(self) -> int:
        return self.numel - self.done


def plan_joint(bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
    """Plans the sync of a jointly held model.

    Args:
        bases: ``lengths`` has one entry per rank of the group and exactly one of them is not 0; views have shares. The
            bases of one parameter are neighbours, of one dtype, and name the same tensors.
        bucket_bytes: upper bound on what a rank stages of one bucket: all of it, or ``held`` segments when ``sharded``.
        sharded, held: see ``Plan``.

    Raises:
        ValueError: the bucket is too small to hold 16 bytes per rank, or two parameters yield the same tensor.
    """
    world = len(bases[0].lengths) if bases else 1
    capacity = segment_capacity(bucket_bytes, world, sharded, held)
    queues = _queues(bases)
    buckets: list[Bucket] = []
    while queues:
        used = [0] * world
        slices: list[Slice] = []
        while (queue := _next(queues, used, capacity)) is not None:
            slices.extend(_place(queues[queue][0], used, capacity))
            if not queues[queue][0].left:
                queues[queue].popleft()
                if not queues[queue]:
                    del queues[queue]
        buckets.append(_seal(bases, slices, max(used), world))
    return Plan(bases, tuple(buckets), digest_of(bases, bucket_bytes, sharded, held), sharded, held)


def _owner(base: Base) -> int:
    (owner,) = (rank for rank, length in enumerate(base.lengths) if length)
    return owner


def _names(base: Base) -> tuple[str, ...]:
    return tuple(view.name for view in base.views)


def _queues(bases: tuple[Base, ...]) -> dict[tuple[int, ...], deque[_Unit]]:
    """The units in model order, grouped by the ranks that hold them."""
    queues: dict[tuple[int, ...], deque[_Unit]] = {}
    seen: set[str] = set()
    for names, group in groupby(range(len(bases)), key=lambda index: _names(bases[index])):
        for name in names:
            if name in seen:
                raise ValueError(f"two tensors of the trainer's model are both named {name!r}")
            seen.add(name)
        members = list(group)
        assert len({bases[index].dtype for index in members}) == 1, f"shards of several dtypes of {names}"
        owners = [_owner(bases[index]) for index in members]
        assert len(set(owners)) == len(owners), f"one rank owns two shards of {names}"
        longest = max((bases[index] for index in members), key=lambda base: base.numel)
        queues.setdefault(tuple(owners), deque()).append(_Unit(members, owners, longest.numel, longest.itemsize))
    return queues


def _next(queues: dict[tuple[int, ...], deque[_Unit]], used: list[int], capacity: int) -> tuple[int, ...] | None:
    """The first queue whose next unit has room; ``None`` when no rank that has anything left can take more."""
    for owners, queue in queues.items():
        unit, room = queue[0], _room(queue[0], used, capacity)
        # A unit that no bucket can hold whole takes whatever room there is
        if room >= unit.left or (room and unit.left * unit.itemsize > capacity):
            return owners
    return None


def _room(unit: _Unit, used: list[int], capacity: int) -> int:
    """Elements of each of its bases that all owners can still take."""
    return min(capacity - used[rank] for rank in unit.owners) // unit.itemsize


def _place(unit: _Unit, used: list[int], capacity: int) -> list[Slice]:
    end = min(unit.done + _room(unit, used, capacity), unit.numel)
    slices = []
    for base, rank in zip(unit.bases, unit.owners, strict=True):
        slices.append(Slice(base, unit.done, end, used[rank]))
        used[rank] = align(used[rank] + (end - unit.done) * unit.itemsize)
    unit.done = end
    return slices


def _seal(bases: tuple[Base, ...], slices: list[Slice], stride: int, world: int) -> Bucket:
    found: dict[str, tuple[Base, tuple[int, ...], int, list[Run]]] = {}
    for part in slices:
        base = bases[part.base]
        first, size = _owner(base) * stride + part.offset, base.itemsize
        here = Run(first, part.begin * size, (part.end - part.begin) * size)  # of the bucket, and in the base
        for view in base.views:
            if pieces := [piece for share in view.shares for piece in compose(here, share.times(size))]:
                _, _, _, held = found.setdefault(view.name, (base, view.shape, view.span, []))
                held.extend(pieces)
    entries = []
    for name, (base, shape, numel, pieces) in found.items():
        ordered = tuple(sorted(pieces, key=lambda piece: piece.target))
        entries.append(Entry(name, base.dtype, shape, None, numel * base.itemsize, ordered))
    return Bucket(world, stride, tuple(slices), tuple(entries))
