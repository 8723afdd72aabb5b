# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into buckets: which bytes of which rank travel together, and where they land. Imports no torch.

Every rank fills its segment of a bucket with its own runs. A base that all ranks share (FSDP) has one place in every
segment. Bases of one owner each (tensor, pipeline, expert parallel) fill the segments independently of one another: a
bucket carries different layers of different stages, and is one transfer. Segments are filled to the end: what does not
fit is torn where a block of fp8 begins, and goes on in the next bucket: parts of blocks need kernels of their own.
"""

from __future__ import annotations

import hashlib
from collections import deque

from verl_sync_plugin.layout.strided import Partition, Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Bucket, Entry, Plan, Slice, View, align

TORN_AT = 128  # elements, the columns of a block in fp8; kernels for parts of blocks took 1.7 s to compile on a CPU


def plan_buckets(bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False) -> Plan:
    """Plans the sync. Bases come in model order; those with more than one entry of ``lengths`` have equally many, and
    the parts of one parameter are neighbours of one dtype that name the same tensors. ``bucket_bytes`` bounds what a
    rank stages of one bucket: all of it, or its own segment when ``sharded`` (see ``Plan``).

    Raises:
        ValueError: the bucket is too small to hold 16 bytes per rank, or two tensors have the same name.
    """
    worlds = {len(base.lengths) for base in bases} - {1}
    assert len(worlds) <= 1, f"bases are sharded over groups of different sizes: {sorted(worlds)}"
    _refuse_duplicates(bases)
    buckets = list[Bucket]()
    for world in [*worlds, 1]:
        capacity = bucket_bytes // (1 if sharded else world) // ALIGNMENT * ALIGNMENT
        if capacity < ALIGNMENT:
            raise ValueError(
                f"bucket of {bucket_bytes} bytes cannot serve {world} ranks with {ALIGNMENT} bytes each; "
                "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
            )
        queues, done = _queues(bases, world), [0] * len(bases)
        while queues:
            used, slices = [0] * world, list[Slice]()
            for owners, queue in queues.items():
                while queue:
                    base, begin, offset = bases[queue[0]], done[queue[0]], max([used[rank] for rank in owners])
                    end = min(whole := max(base.lengths), begin + (capacity - offset) // base.itemsize)
                    if end < whole and (begin < (in_blocks := end // TORN_AT * TORN_AT) or offset):
                        end = in_blocks
                    if end > begin:
                        slices.append(Slice(queue[0], begin, end, offset))
                        done[queue[0]] = end
                        for rank in owners:
                            used[rank] = align(offset + (end - begin) * base.itemsize)
                    if end < whole:
                        break
                    queue.popleft()
            queues = {owners: queue for owners, queue in queues.items() if queue}
            first = buckets[-1].first + buckets[-1].nbytes if buckets else 0
            buckets.append(_seal(bases, slices, max(used), world, first))
    digest = hashlib.sha256(repr((bases, bucket_bytes, sharded)).encode()).hexdigest()
    return Plan(bases, tuple(buckets), digest, sharded)


def _queues(bases: tuple[Base, ...], world: int) -> dict[tuple[int, ...], deque[int]]:
    """The bases in model order, by number, grouped by the ranks that hold something of them."""
    queues: dict[tuple[int, ...], deque[int]] = {}
    for index, base in enumerate(bases):
        if len(base.lengths) == world and any(base.lengths):
            queues.setdefault(tuple(rank for rank, held in enumerate(base.lengths) if held), deque()).append(index)
    return queues


def _refuse_duplicates(bases: tuple[Base, ...]) -> None:
    """Only parts of one parameter have the same names: neighbours of one dtype, each a part of its tensors."""
    seen, before = set[str](), None
    for base in bases:
        names, parted = [view.name for view in base.views], len(base.lengths) > 1 and any(v.shares for v in base.views)
        if parted and (names, base.dtype) == before:
            continue
        before = (names, base.dtype) if parted else None
        for name in names:
            if name in seen:
                raise ValueError(f"two tensors of the trainer's model are both named {name!r}")
            seen.add(name)


def _seal(bases: tuple[Base, ...], slices: list[Slice], stride: int, world: int, first: int) -> Bucket:
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
                runs = [run.in_bytes(size) for run in view.runs]
                pieces = [piece for run in runs for _, piece in here.meet(run)]
            if pieces:
                found.setdefault(view.name, (base, view, []))[2].extend(pieces)
    entries = []
    for name, (base, view, pieces) in found.items():
        pieces.sort(key=lambda piece: piece.target)
        entries.append(Entry(name, base.dtype, view.shape, view.strides, view.span * base.itemsize, tuple(pieces)))
    return Bucket(world, stride, tuple(slices), tuple(entries), first)
