# SPDX-License-Identifier: Apache-2.0
"""Trainers whose ranks hold boxes of their tensors: DTensors of any placement (TP, EP, FSDP over either), over one or
several meshes, and whatever else says which box of which tensor a rank has.

Every rank tells the others once what it holds. Of each box one holder sends, chosen so that all send about as much;
what the boxes leave out of a tensor, or hold of it twice, is refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.strided import Run, box_runs, compose
from verl_sync_plugin.layout.tensors import Base, Plan, View
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.trainers.naming import Rewrite, hf_views
from verl_sync_plugin.trainers.wire import WirePolicy
from verl_sync_plugin.transport.agreement import Agreement

NOTHING = Run(0, 0, 0)  # the share of a tensor of which a box holds no element


@dataclass(frozen=True)
class Box:
    """What one rank holds of one tensor.

    Attributes:
        name: the trainer's.
        dtype: the trainer's.
        wire: dtype in which it travels.
        whole: shape of the tensor.
        size: shape of the box, of at least one element.
        offset: of its first element.
        views: what a checkpoint has of the whole tensor, as runs from it.
    """

    name: str
    dtype: str
    wire: str
    whole: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    views: tuple[View, ...]


@dataclass(frozen=True, eq=False)
class Held:
    """One tensor on this rank.

    Attributes:
        name: the trainer's.
        whole: shape of the whole tensor.
        offset: of the local part in it.
        local: the local part, of its own shape; perhaps without elements.
        rewrite: makes the checkpoint's tensors of the whole one, by slicing alone.
        parameter: travels in the dtype of parameters; buffers keep their own.
    """

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor
    rewrite: Rewrite
    parameter: bool = True


class PlacedSource(ParameterSource):
    """Reads boxes. Before ``shards`` comes ``agree_on_layout``.

    Args:
        policy: wire dtypes.
    """

    def __init__(self, policy: WirePolicy) -> None:
        super().__init__()
        self._policy = policy
        self._now: dict[str, Held] = {}
        self._boxes: tuple[Box, ...] = ()
        self._bases: tuple[Base, ...] = ()  # empty until the ranks have agreed
        self._mine: dict[int, str] = {}  # base -> tensor

    @abstractmethod
    def held(self) -> Iterator[Held]:
        """All tensors of which this rank may hold something, in model order.

        Raises:
            ValueError: one is laid out in no box; names it.
        """

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """See ``ParameterSource``; the ranks tell each other their boxes when any rank's have changed."""
        if agreement.any("looking for the trainer's weights", self._changed):
            self._bases = ()
            everywhere = agreement.gather("exchanging the layout of the trainer", self._boxes)
            agreement.step("matching the layouts of all ranks", lambda: self._adopt(everywhere))
            self._group = dist.group.WORLD if len(everywhere) > 1 else None
        return self

    def _changed(self) -> bool:
        self._now = {held.name: held for held in self.held()}
        before = {box.name: box for box in self._boxes}
        self._boxes = tuple(self._box(held, before.get(held.name)) for held in self._now.values() if held.local.numel())
        return not self._bases or self._boxes != tuple(before.values())

    def _box(self, held: Held, before: Box | None) -> Box:
        dtype = held.local.dtype
        found = Box(held.name, dtype_name(dtype), "", held.whole, tuple(held.local.shape), held.offset, ())
        if before is not None and replace(before, views=(), wire="") == found:
            return before
        views = tuple(hf_views(held.name, held.whole, dtype, 0, held.rewrite))
        for view in views:
            if view.strides is not None:
                raise ValueError(
                    f"tensor {view.name!r} is no contiguous part of {held.name!r}, of which ranks hold parts. "
                    "Gather it with full_tensor() and give it by itself."
                )
        wire = self._policy.of_parameter([view.name for view in views], dtype) if held.parameter else dtype
        return replace(found, views=views, wire=dtype_name(wire))

    def _adopt(self, everywhere: list[tuple[Box, ...]]) -> None:
        """Works out who sends what; the same on every rank.

        Raises:
            ValueError: the boxes are no parts of one whole; names the tensor.
        """
        holders: dict[str, dict[Box, list[int]]] = {}
        for rank, boxes in enumerate(everywhere):
            for box in boxes:
                holders.setdefault(box.name, {}).setdefault(box, []).append(rank)
        bases: list[Base] = []
        mine: dict[int, str] = {}
        load = [0] * len(everywhere)
        for name, found in holders.items():
            _check_whole(name, list(found))
            taken: set[int] = set()
            for box, ranks in sorted(found.items(), key=lambda item: item[0].offset):
                owner = min(set(ranks) - taken or ranks, key=lambda rank: (load[rank], rank))
                taken.add(owner)
                load[owner] += prod(box.size) * getattr(torch, box.dtype).itemsize
                if owner == dist.get_rank():
                    mine[len(bases)] = name
                bases.append(self._base(box, owner, len(everywhere)))
        self._bases, self._mine = tuple(bases), mine

    def _base(self, box: Box, owner: int, world: int) -> Base:
        runs = box_runs(box.size, box.offset, box.whole)
        views = []
        for view in box.views:
            part = Run(view.start, 0, view.span)
            shares = tuple(share for run in runs for share in compose(run, part))
            views.append(View(view.name, view.shape, 0, view.span, None, shares or (NOTHING,)))
        lengths = tuple(prod(box.size) if rank == owner else 0 for rank in range(world))
        key = f"{box.name} (from {box.offset})" if box.size != box.whole else box.name
        return Base(key, box.wire, getattr(torch, box.wire).itemsize, lengths, tuple(views))

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
        return plan_buckets(bases, bucket_bytes, sharded, held)

    def shards(self) -> list[Shard]:
        assert self._bases, "the ranks have not agreed on the layout"
        return [self._shard(index, base) for index, base in enumerate(self._bases)]

    def _shard(self, index: int, base: Base) -> Shard:
        if index not in self._mine:
            return Shard(base, partial(torch.empty, 0))
        local = self._now[self._mine[index]].local.detach()
        return Shard(base, partial(local.reshape, -1), run=local if local.is_contiguous() else None)

    def release(self) -> None:
        """See ``ParameterSource``."""
        self._now = {}


def _check_whole(name: str, boxes: list[Box]) -> None:
    """Raises ValueError unless the boxes are all of one tensor, every element once."""
    like = boxes[0]
    if len({(box.dtype, box.whole, box.views) for box in boxes}) > 1:
        said = "; ".join(sorted({f"{box.dtype} of shape {box.whole}" for box in boxes}))
        raise ValueError(f"the ranks disagree on parameter {name!r}: {said}")
    numel = sum(prod(box.size) for box in boxes)
    twice = [
        (one, other)
        for index, one in enumerate(boxes)
        for other in boxes[index + 1 :]
        if all(
            low < at + size and at < low + length
            for low, length, at, size in zip(one.offset, one.size, other.offset, other.size, strict=True)
        )
    ]
    if twice or numel != prod(like.whole):
        wrong = (
            f"{numel} of {prod(like.whole)} elements" if not twice else f"boxes that overlap at {twice[0][1].offset}"
        )
        raise ValueError(f"the ranks together hold {wrong} of parameter {name!r}, of shape {like.whole}")
