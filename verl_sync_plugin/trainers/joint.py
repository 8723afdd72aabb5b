# SPDX-License-Identifier: Apache-2.0
"""Trainers whose ranks hold different parts of their tensors: Megatron, DTensors of any placement, verl's
``ShardSpec``.

Every rank says once what it holds. A bucket then carries parts of all ranks that hold the model together, whatever the
mix of parallel layouts. Of each part one holder sends, chosen so that all send about as much. What the parts leave out
of a tensor, or hold of it twice, is refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod

import torch
import torch.distributed as dist

from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy, dtype_name
from verl_sync_plugin.transport.agreement import Agreement


@dataclass(frozen=True)
class Part:
    """One rank's part of the parameter of this ``name``; ranks with equal places hold the same part. ``views`` are the
    HF tensors that it yields, with this part's shares of them; all parts agree in ``common``, which ``text`` says in
    words. A ``buffer`` keeps its dtype. ``adapter`` of an adapted weight: True if it belongs to experts, and the
    adapter's rank."""

    name: str
    place: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    views: tuple[View, ...]
    common: tuple[object, ...] = ()
    text: str = ""
    buffer: bool = False
    adapter: tuple[bool, int] | None = None


@dataclass(frozen=True)
class RankLayout:
    """One rank's share of the model: its parts in model order, and the ranks of its model-parallel groups. ``computed``
    names the first parameter whose HF tensors are more than copies of it, and why."""

    parts: tuple[Part, ...]
    groups: tuple[tuple[int, ...], ...]
    computed: str = ""


# One parameter in one replica of the model: its parts, and the ranks of the world that hold each
Unit = list[tuple[Part, list[int]]]


class JointSource(ParameterSource):
    """Reads what the ranks hold in parts. Before ``shards`` comes ``agree_on_layout``."""

    def __init__(self, policy: WirePolicy) -> None:
        self._policy = policy
        self._readings = 0  # of the layout, by all ranks together
        self._bases: list[Base] = []  # empty until the ranks have agreed
        self._parts: list[Part] = []  # of each base, on every rank
        self._mine: dict[int, str] = {}  # base -> parameter of this rank

    @abstractmethod
    def look(self) -> bool:
        """Finds this rank's tensors; returns whether their names, shapes, dtypes or places are others than before."""

    @abstractmethod
    def read(self, run: str) -> RankLayout:
        """This rank's layout, as it was when last looked at; ``run`` names this reading alike on all ranks. Raises
        ValueError for a parameter that cannot be sent as it is stored."""

    @abstractmethod
    def shard(self, base: Base, name: str) -> Shard:
        """A base of which this rank sends its part of the parameter of that name."""

    def check_whole(self, parts: Sequence[Part]) -> None:
        """Raises ValueError when parts that are alike, each in another place, cannot be those of one parameter."""

    def instead(self, layouts: list[RankLayout]) -> ParameterSource | None:
        """The source that reads this trainer in place of this one, by the layouts of all ranks."""
        return None

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of this rank that may be those of a replica; a communicator of its own costs device memory."""
        return ()

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """The ranks exchange their layouts when any of them has changed."""
        if not agreement.any("looking for the trainer's weights", self._changed):
            return self
        self._bases, self._readings = [], self._readings + 1
        run = f"layout {agreement.name}.{self._readings}"
        layout = agreement.step("reading the layout of the trainer", lambda: self.read(run))
        layouts = agreement.gather("exchanging the layout of the trainer", layout)
        if (other := self.instead(layouts)) is not None:
            return other.agree_on_layout(agreement)
        bases = agreement.step("matching the layouts of all ranks", lambda: self._match(layouts))
        self.group = self._group_of(replicas(layouts))
        self._bases = bases
        return self

    def _changed(self) -> bool:
        if self.look():
            self._bases = []
        return not self._bases

    def _match(self, layouts: list[RankLayout]) -> list[Base]:
        """Works out who sends what. Raises ValueError, the same on every rank, where the ranks disagree."""
        units_of, rank = match(layouts), dist.get_rank()
        for unit in chain(*units_of.values()):
            self.check_whole([part for part, _ in unit])
        ranks, units = next((ranks, units) for ranks, units in units_of.items() if rank in ranks)
        bases: list[Base] = []
        self._parts, self._mine = [], {}
        for unit, senders in zip(units, choose_owners(units, ranks), strict=True):
            like = unit[0][0]
            wire = getattr(torch, like.dtype)
            if not like.buffer:
                wire = self._policy.of_parameter([view.name for view in like.views], wire)
            for (part, _), sender in zip(unit, senders, strict=True):
                if not part.views:
                    continue
                if sender == rank:
                    self._mine[len(bases)] = part.name
                lengths = tuple(prod(part.shape) if each == sender else 0 for each in ranks)
                key = f"{part.name} (part {', '.join(map(str, part.place))})" if len(unit) > 1 else part.name
                bases.append(Base(key, dtype_name(wire), wire.itemsize, lengths, part.views))
                self._parts.append(part)
        return bases

    def _group_of(self, members: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """This rank's replica as a group. Collective."""
        if len(members[0]) == 1:
            return None
        if len(members) == 1:
            return dist.group.WORLD
        for group in self.groups():
            # Replicas are alike, so all ranks come to the same choice
            if tuple(dist.get_process_group_ranks(group)) in members:
                return group
        groups = [dist.new_group(list(ranks)) for ranks in members]
        return next(group for ranks, group in zip(members, groups, strict=True) if dist.get_rank() in ranks)

    def shards(self) -> list[Shard]:
        assert self._bases, "the ranks have not agreed on the layout"
        mine = self._mine
        return [
            self.shard(base, mine[index]) if index in mine else Shard(base, partial(torch.empty, 0))
            for index, base in enumerate(self._bases)
        ]


def replicas(layouts: list[RankLayout]) -> list[tuple[int, ...]]:
    """The smallest sets of ranks that hold the whole model and cut through no model-parallel group, sorted."""
    sets = [{rank} for rank in range(len(layouts))]
    for layout in layouts:
        for group in layout.groups:
            joined = set().union(*(sets[rank] for rank in group))
            for rank in joined:
                sets[rank] = joined
    return sorted({tuple(sorted(each)) for each in sets})


def match(layouts: list[RankLayout]) -> dict[tuple[int, ...], list[Unit]]:
    """The parameters of each replica, in model order, from the layouts of all ranks in rank order. Raises ValueError,
    with parameter and ranks, where ranks disagree on one, or hold less or more than all of it."""
    found: dict[str, dict[int, Part]] = defaultdict(dict)  # name -> rank -> part
    for rank, layout in enumerate(layouts):
        for part in layout.parts:
            if rank in found[part.name]:
                raise ValueError(f"parameter {part.name!r} is there twice on rank {rank}")
            found[part.name][rank] = part
    for name, parts in found.items():
        _check_alike(name, parts)
    return {ranks: [_unit(ranks, name, parts) for name, parts in found.items()] for ranks in replicas(layouts)}


def _check_alike(name: str, parts: dict[int, Part]) -> None:
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, part in parts.items():
        products = tuple((view.name, view.shape) for view in part.views)
        kinds[part.dtype, part.buffer, part.adapter, part.common, products].append(rank)
    if len(kinds) > 1:
        said = {_ranks(ranks): parts[ranks[0]].text for ranks in kinds.values()}
        if len(set(said.values())) == 1:  # then what it becomes differs
            said = {_ranks(ranks): f"{kind}" for kind, ranks in kinds.items()}
        text = "; ".join(f"{ranks}: {words}" for ranks, words in said.items())
        raise ValueError(f"the ranks disagree on parameter {name!r}: {text}")


def _unit(ranks: tuple[int, ...], name: str, found: dict[int, Part]) -> Unit:
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by place
    for rank in ranks:
        if rank in found:
            holders[found[rank].place].append(rank)
    unit = [(found[holding[0]], holding) for _, holding in sorted(holders.items())]
    like, who = next(iter(found.values())), f"{_ranks(ranks)} {'hold' if len(ranks) > 1 else 'holds'}"
    of = f"of parameter {name!r} ({like.text}), which {_ranks(found)} hold"
    if not unit:
        raise ValueError(f"{who} no copy {of}")
    for number, view in enumerate(like.views):
        held = sum(run.width * run.count for part, _ in unit for run in part.views[number].shares)
        if held != view.span:
            raise ValueError(f"{who} {held} of {view.span} elements {of}")
    return unit


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def choose_owners(units: list[Unit], ranks: tuple[int, ...]) -> list[list[int]]:
    """The rank of a replica that sends each part of its units, so that all ranks send about as much."""
    load = dict.fromkeys(ranks, 0)
    chosen = [[0] * len(unit) for unit in units]
    places = [(index, number) for index, unit in enumerate(units) for number in range(len(unit))]
    # What only one rank holds comes first: the others' choice evens it out
    for index, number in sorted(places, key=lambda place: len(units[place[0]][place[1]][1]) > 1):
        part, holders = units[index][number]
        chosen[index][number] = rank = min(holders, key=lambda rank: (load[rank], rank))
        load[rank] += prod(part.shape) * getattr(torch, part.dtype).itemsize
    return chosen
