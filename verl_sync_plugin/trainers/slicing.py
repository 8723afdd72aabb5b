# SPDX-License-Identifier: Apache-2.0
"""Parts of a base as bases of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from verl_sync_plugin.layout.shard import Member, Shard
from verl_sync_plugin.layout.tensors import Base, View


@dataclass(frozen=True)
class Part:
    """Some or all elements of a base. Made once; the shards it is applied to change with every sync.

    Attributes:
        base: what the part is as a base.
        members: the parameters in it.
        offset: of this rank's run in its run of the old base; ``None`` when the part is the whole base.
        count: elements of this rank's run.
    """

    base: Base
    members: tuple[Member, ...] = ()
    offset: int | None = None
    count: int = 0

    def of(self, shard: Shard) -> Shard:
        """This part of a shard of the old base, which has no ``merge``."""
        if self.base is shard.base:
            return shard
        if self.offset is None:
            return Shard(self.base, shard.local, members=self.members, run=shard.run)
        return Shard(self.base, partial(_narrow, shard, self.offset, self.count), members=self.members)


def part_of(
    base: Base, rank: int, key: str, start: int, numel: int, views: tuple[View, ...], members: tuple[Member, ...] = ()
) -> Part:
    """Elements ``[start, start + numel)`` of a base.

    Args:
        base: the whole.
        rank: this rank's place among its owners.
        key: name of the new base.
        start: first element.
        numel: how many.
        views: of the old base; all inside the part.
        members: of the new base.
    """
    firsts = [0, *accumulate(base.lengths)]
    cuts = [
        (max(first, start), min(first + length, start + numel))
        for first, length in zip(firsts, base.lengths, strict=False)
    ]
    lengths = tuple(max(stop - low, 0) for low, stop in cuts)
    moved = tuple(replace(view, start=view.start - start) for view in views)
    part = Base(key, base.dtype, base.itemsize, lengths, moved)
    return Part(part, members, cuts[rank][0] - firsts[rank], lengths[rank])


def _narrow(shard: Shard, offset: int, count: int) -> torch.Tensor:
    return shard.local()[offset : offset + count] if count else shard.local()[:0]
