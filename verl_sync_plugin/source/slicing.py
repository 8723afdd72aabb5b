"""Shards of a part of a base."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from verl_sync_plugin.bucket import Base, View
from verl_sync_plugin.source.base import Shard


def part_of(shard: Shard, rank: int, key: str, start: int, numel: int, views: tuple[View, ...]) -> Shard:
    """The shard of elements ``[start, start + numel)`` of a base, as a base of its own.

    Args:
        shard: this rank's shard of the whole base.
        rank: this rank's place among the owners of the base.
        key: name of the new base.
        views: of the old base; all inside the part.

    Returns:
        A shard whose runs are what each owner holds of the part, without ``merge`` and ``members``.
    """
    firsts = [0, *accumulate(shard.base.lengths)]
    cuts = [
        (max(first, start), min(first + length, start + numel))
        for first, length in zip(firsts, shard.base.lengths, strict=False)
    ]
    lengths = tuple(max(stop - low, 0) for low, stop in cuts)
    moved = tuple(replace(view, start=view.start - start) for view in views)
    base = Base(key, shard.base.dtype, shard.base.itemsize, lengths, moved)
    return Shard(base, partial(_narrow, shard, cuts[rank][0] - firsts[rank], lengths[rank]))


def _narrow(shard: Shard, offset: int, count: int) -> torch.Tensor:
    return shard.local()[offset : offset + count] if count else shard.local()[:0]
