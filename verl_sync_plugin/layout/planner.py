# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into buckets: which bytes of which shard travel together, and where they land. Imports no torch."""

from __future__ import annotations

import hashlib
from itertools import accumulate

from verl_sync_plugin.layout.strided import Partition, Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Bucket, Entry, Plan, Slice, align


def plan_buckets(bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
    """Plans the sync.

    Args:
        bases: in the order of the model; bases with more than one owner must all have the same number of owners.
        bucket_bytes: upper bound on what a rank stages of one bucket: all of it, or ``held`` segments when ``sharded``.
            A base that does not fit is split over several buckets.
        sharded, held: see ``Plan``.

    Raises:
        ValueError: the bucket is too small to hold 16 bytes per rank, or two views have the same name.
    """
    _check_names(bases)
    worlds = {len(base.lengths) for base in bases} - {1}
    assert len(worlds) <= 1, f"bases are sharded over groups of different sizes: {sorted(worlds)}"
    buckets: list[Bucket] = []
    for world in [*sorted(worlds), 1]:
        capacity = segment_capacity(bucket_bytes, world, sharded, held)
        chosen = [index for index, base in enumerate(bases) if len(base.lengths) == world]
        buckets.extend(_seal(bases, slices, world) for slices in _cut(bases, chosen, capacity))
    return Plan(bases, tuple(buckets), digest_of(bases, bucket_bytes, sharded, held), sharded, held)


def segment_capacity(bucket_bytes: int, world: int, sharded: bool, held: int) -> int:
    """The most bytes of one rank's segment.

    Raises:
        ValueError: that is less than 16 bytes.
    """
    capacity = bucket_bytes // (min(held, world) if sharded else world) // ALIGNMENT * ALIGNMENT
    if capacity < ALIGNMENT:
        raise ValueError(
            f"bucket of {bucket_bytes} bytes cannot serve {world} ranks with {ALIGNMENT} bytes each; "
            "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
        )
    return capacity


def digest_of(bases: tuple[Base, ...], bucket_bytes: int, sharded: bool, held: int) -> str:
    """Names the plan that these arguments give."""
    return hashlib.sha256(repr((bases, bucket_bytes, sharded, held)).encode()).hexdigest()


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
    size = base.itemsize
    held = Partition(  # what each rank sends: where in the bucket, and of which bytes of the base
        [
            Run(rank * stride + part.offset, (starts[rank] + part.begin) * size, count * size)
            for rank in range(len(base.lengths))
            if (count := part.count(base, rank)) > 0
        ]
    )
    entries = []
    for view in base.views:
        pieces = tuple(piece for _, piece in held.meet(Run(view.start * size, 0, view.span * size)))
        if pieces:
            entries.append(Entry(view.name, base.dtype, view.shape, view.strides, view.span * size, pieces))
    return entries
