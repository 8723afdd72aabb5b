# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which part of a Megatron model, told to all ranks once and checked by every rank. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from verl_sync_plugin.layout.strided import Run


@dataclass(frozen=True)
class Product:
    """One HF tensor that a Megatron parameter yields.

    Attributes:
        name: HF name.
        shape: full shape.
        digest: of ``shares``, by which products are compared: ranks tell each other thousands of them.
        shares: by part of the parameter, what it contributes.
    """

    name: str
    shape: tuple[int, ...]
    digest: str
    shares: tuple[tuple[Run, ...], ...] = field(compare=False, repr=False)


@dataclass(frozen=True)
class LocalParameter:
    """What one rank holds of one parameter.

    Attributes:
        name: Megatron's name with global layer and expert numbers.
        shape: of the local part.
        dtype: the trainer's, for example ``bfloat16``.
        part: which part of the parameter this is, of ``parts``; parts are equal in shape.
        parts: tensor-parallel size the parameter is split by; 1 when ranks hold all of it.
        dim: dimension it is split along.
        buffer: a persistent buffer, which keeps its dtype.
        products: the HF tensors that it yields; none where the bridge exports nothing of it.
        adapter: of a weight with a LoRA adapter, which ranks its factors are split over, and its rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: int = 0
    parts: int = 1
    dim: int = 0
    buffer: bool = False
    products: tuple[Product, ...] = ()
    adapter: tuple[str, int] | None = None

    def describe(self) -> str:
        part = f", part {self.part + 1} of {self.parts} along dimension {self.dim}" if self.parts > 1 else ""
        return f"{self.dtype} {tuple(self.shape)}{part}"


@dataclass(frozen=True)
class RankLayout:
    """One rank's share of the model.

    Attributes:
        parameters: in model order.
        groups: ranks (of the world) of the rank's model-parallel groups: dense, and that of the experts.
        computed: the first parameter whose HF tensors are more than copies of it, and why; empty when there is none.
    """

    parameters: tuple[LocalParameter, ...]
    groups: tuple[tuple[int, ...], ...]
    computed: str = ""


@dataclass(frozen=True)
class Unit:
    """One parameter in one replica of the model.

    Attributes:
        like: any of its parts.
        holders: per part, the ranks of the world that hold it.
    """

    like: LocalParameter
    holders: tuple[tuple[int, ...], ...]


def replicas(layouts: list[RankLayout]) -> list[tuple[int, ...]]:
    """The smallest sets of ranks that hold the whole model and cut through no model-parallel group, sorted.

    Args:
        layouts: of all ranks of the world, in rank order.
    """
    joined = list(range(len(layouts)))

    def root(rank: int) -> int:
        while joined[rank] != rank:
            rank = joined[rank]
        return rank

    for layout in layouts:
        for group in layout.groups:
            for rank in group:
                low, high = sorted((root(group[0]), root(rank)))
                joined[high] = low
    sets: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(layouts)):
        sets[root(rank)].append(rank)
    return sorted(tuple(ranks) for ranks in sets.values())


def match(layouts: list[RankLayout]) -> list[list[Unit]]:
    """The parameters of each replica, in model order; the same on every rank.

    Args:
        layouts: of all ranks of the world, in rank order.

    Raises:
        ValueError: ranks disagree on a parameter, or nobody holds a part of one; names the parameter and the ranks.
    """
    holders: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # name -> part -> ranks
    records: dict[tuple[str, int], LocalParameter] = {}
    for rank, layout in enumerate(layouts):
        for parameter in layout.parameters:
            if rank in holders[parameter.name][parameter.part]:
                raise ValueError(f"parameter {parameter.name!r} is there twice on rank {rank}")
            holders[parameter.name][parameter.part].append(rank)
            records[parameter.name, rank] = parameter
    for name, by_part in holders.items():
        _check_alike(name, {rank: records[name, rank] for ranks in by_part.values() for rank in ranks})
    return [_units(ranks, holders, records) for ranks in replicas(layouts)]


def _check_alike(name: str, found: dict[int, LocalParameter]) -> None:
    kinds: dict[LocalParameter, list[int]] = defaultdict(list)
    for rank, parameter in sorted(found.items()):
        kinds[replace(parameter, part=0)].append(rank)
    if len(kinds) == 1:
        return
    said = {_ranks(ranks): found[ranks[0]].describe() for ranks in kinds.values()}
    if len(set(said.values())) == 1:  # then what it becomes differs
        said = {_ranks(ranks): f"{kind.products}" for kind, ranks in kinds.items()}
    told = "; ".join(f"{ranks}: {text}" for ranks, text in said.items())
    raise ValueError(f"the ranks disagree on parameter {name!r}: {told}")


def _units(
    ranks: tuple[int, ...],
    holders: dict[str, dict[int, list[int]]],
    records: dict[tuple[str, int], LocalParameter],
) -> list[Unit]:
    members = set(ranks)
    units = []
    for name, by_part in holders.items():
        first = next(iter(by_part.values()))[0]
        like = records[name, first]
        held = tuple(tuple(rank for rank in by_part.get(part, ()) if rank in members) for part in range(like.parts))
        lacking = [part for part, found in enumerate(held) if not found]
        if lacking:
            who = f"{_ranks(ranks)} hold no" if len(ranks) > 1 else f"{_ranks(ranks)} holds no"
            there = _ranks(sorted(rank for found in by_part.values() for rank in found))
            what = f"part {lacking[0] + 1} of {like.parts} of" if like.parts > 1 else "copy of"
            raise ValueError(f"{who} {what} parameter {name!r} ({like.describe()}), which {there} hold")
        units.append(Unit(like, held))
    return units


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def choose_owners(units: list[Unit], ranks: tuple[int, ...], nbytes: list[int]) -> list[tuple[int, ...]]:
    """Who sends each part, so that all ranks send about as much; places in ``ranks``.

    Args:
        units: of one replica.
        ranks: the replica.
        nbytes: bytes of one part of each unit.
    """
    load = dict.fromkeys(ranks, 0)
    place = {rank: index for index, rank in enumerate(ranks)}
    # What only one rank holds comes first: the others' choice evens it out
    order = sorted(range(len(units)), key=lambda index: max(map(len, units[index].holders)) > 1)
    chosen: dict[int, tuple[int, ...]] = {}
    for index in order:
        picked = []
        for held in units[index].holders:
            rank = min(held, key=lambda rank: (load[rank], rank))
            load[rank] += nbytes[index]
            picked.append(place[rank])
        chosen[index] = tuple(picked)
    return [chosen[index] for index in range(len(units))]
