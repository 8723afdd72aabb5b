# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into buckets: which bytes of which rank travel together, and where they land. Imports no torch.

Every rank fills its segment of a bucket with its own runs. A base that all ranks share (FSDP) has one place in every
segment. Bases of one owner each (tensor, pipeline, expert parallel) fill the segments independently of one another: a
bucket carries different layers of different stages, and is one transfer. Those that make up the same tensors travel in
the same bucket, so that the engine gets these tensors whole; only what no segment can hold is torn.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from verl_sync_plugin.layout.strided import Partition, Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Bucket, Entry, Plan, Slice, View, align

Owners = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Unit:
    """Bases that travel together: the parts of one parameter, or a base that all ranks share. ``owners`` are the ranks
    that hold something of each base; ``numel`` the elements of the longest run, of which ``done`` have been placed.
    Where it is torn, multiples of ``grain`` elements stay together."""

    bases: list[int]
    owners: Owners
    numel: int
    itemsize: int
    grain: int
    done: int = 0

    def room(self, used: list[int], capacity: int) -> int:
        """Elements of each run that all owners can still take; 0 where the unit has to wait for the next bucket."""
        free = (capacity - max([max([used[rank] for rank in ranks]) for ranks in self.owners])) // self.itemsize
        left = self.numel - self.done
        if free >= left:
            return left
        # Only what no bucket holds whole takes whatever room there is
        return free // self.grain * self.grain if left * self.itemsize > capacity else 0

    def place(self, count: int, used: list[int]) -> list[Slice]:
        slices, end = [], self.done + count
        for base, ranks in zip(self.bases, self.owners, strict=True):
            offset = max([used[rank] for rank in ranks])
            slices.append(Slice(base, self.done, end, offset))
            for rank in ranks:
                used[rank] = align(offset + count * self.itemsize)
        self.done = end
        return slices


def plan_buckets(bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False) -> Plan:
    """Plans the sync. Bases come in model order; those with more than one entry of ``lengths`` have equally many, and
    the parts of one parameter are neighbours of one dtype that name the same tensors. ``bucket_bytes`` bounds what a
    rank stages of one bucket: all of it, or its own segment when ``sharded`` (see ``Plan``).

    Raises:
        ValueError: the bucket is too small to hold 16 bytes per rank, or two tensors have the same name.
    """
    worlds = {len(base.lengths) for base in bases} - {1}
    assert len(worlds) <= 1, f"bases are sharded over groups of different sizes: {sorted(worlds)}"
    groups, buckets = _groups(bases), list[Bucket]()
    for world in [*worlds, 1]:
        capacity = bucket_bytes // (1 if sharded else world) // ALIGNMENT * ALIGNMENT
        if capacity < ALIGNMENT:
            raise ValueError(
                f"bucket of {bucket_bytes} bytes cannot serve {world} ranks with {ALIGNMENT} bytes each; "
                "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
            )
        queues = _queues(bases, groups, world, capacity)
        while queues:
            used, slices = [0] * world, list[Slice]()
            fits = True
            while fits:
                fits = False
                for queue in list(queues.values()):  # every rank's segment is filled before the bucket is closed
                    while queue and (room := queue[0].room(used, capacity)):
                        fits = True
                        slices.extend(queue[0].place(room, used))
                        if queue[0].done == queue[0].numel:
                            queue.popleft()
            queues = {owners: queue for owners, queue in queues.items() if queue}
            buckets.append(_seal(bases, slices, max(used), world))
    digest = hashlib.sha256(repr((bases, bucket_bytes, sharded)).encode()).hexdigest()
    return Plan(bases, tuple(buckets), digest, sharded)


def _groups(bases: tuple[Base, ...]) -> list[list[int]]:
    """The bases that travel together, by number: the parts of one parameter, else each by itself."""
    groups, seen = list[list[int]](), set[str]()
    before: list[str] = []  # names of a parameter that may have more parts
    for index, base in enumerate(bases):
        names = [view.name for view in base.views]
        if names == before and _alone(base):
            groups[-1].append(index)
            continue
        groups.append([index])
        before = names if _alone(base) else []
        for name in names:
            if name in seen:
                raise ValueError(f"two tensors of the trainer's model are both named {name!r}")
            seen.add(name)
    return groups


def _alone(base: Base) -> bool:
    """One rank of several holds all of it, which is a part of some tensors."""
    return len(base.lengths) > 1 and any(view.shares for view in base.views)


def _queues(bases: tuple[Base, ...], groups: list[list[int]], world: int, capacity: int) -> dict[Owners, deque[_Unit]]:
    """The units in model order, grouped by the ranks that hold them."""
    queues: dict[Owners, deque[_Unit]] = {}
    for group in groups:
        parts = [bases[index] for index in group]
        longest = max(max(part.lengths) for part in parts)
        if len(parts[0].lengths) != world or not longest:
            continue
        owners: Owners = (tuple(range(world)),)
        if _alone(parts[0]):
            names = [view.name for view in parts[0].views]
            assert len({part.dtype for part in parts}) == 1, f"shards of several dtypes of {names}"
            owners = tuple(tuple(rank for rank, held in enumerate(part.lengths) if held) for part in parts)
            assert len(set(owners)) == len(owners), f"one rank owns two shards of {names}"
        unit = _Unit(group, owners, longest, parts[0].itemsize, _grain(parts[0], capacity))
        queues.setdefault(owners, deque()).append(unit)
    return queues


def _grain(base: Base, capacity: int) -> int:
    """Elements of a view where views tile all runs (fused experts) and fit into a segment, else 1."""
    spans = {view.span for view in base.views}
    if len(spans) != 1 or _alone(base):
        return 1
    span = spans.pop()
    return span if span * base.itemsize <= capacity and not any(length % span for length in base.lengths) else 1


def _seal(bases: tuple[Base, ...], slices: list[Slice], stride: int, world: int) -> Bucket:
    """The bucket of these slices, with the tensors that have bytes in it."""
    found: dict[str, tuple[Base, View, list[Run]]] = {}
    for part in slices:
        base, start, held = bases[part.base], 0, list[Run]()
        size, begin, end = base.itemsize, part.begin, part.end
        for rank, length in enumerate(base.lengths):
            if length > begin:  # of the bucket, and in the base
                source, target = rank * stride + part.offset, (start + begin) * size
                held.append(Run(source, target, ((end if end < length else length) - begin) * size))
            start += length
        here: Partition | None = None
        for view in base.views:
            if view.span == start and not view.start and not view.shares:
                pieces = held  # all of the base
            else:
                here = here or Partition(held)
                runs = [run.times(size) for run in view.runs]
                pieces = [piece for run in runs for _, piece in here.meet(run)]
            if pieces:
                found.setdefault(view.name, (base, view, []))[2].extend(pieces)
    entries = []
    for name, (base, view, pieces) in found.items():
        pieces.sort(key=lambda piece: piece.target)
        nbytes = view.span * base.itemsize
        entries.append(Entry(name, base.dtype, view.shape, view.strides, nbytes, tuple(pieces)))
    return Bucket(world, stride, tuple(slices), tuple(entries))
