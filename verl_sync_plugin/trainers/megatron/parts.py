# SPDX-License-Identifier: Apache-2.0
"""Works out which rank sends which part of the parameters.

Every rank says once what it holds. A bucket then carries parts of all ranks that hold the model together, whatever the
mix of parallel layouts. Of each part one holder sends, chosen so that all send about as much. What the parts leave out
of a tensor, or hold of it twice, is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_sync_plugin.layout.load_map import length, spans_of
from verl_sync_plugin.layout.tensors import View


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
        runs = [run for part, _ in unit for run in part.views[number].shares if run.width]
        firsts = [(run.target + np.arange(run.count) * run.target_stride, run.width) for run in runs]
        different = length(spans_of([np.stack((first, first + width), 1) for first, width in firsts]))
        held = sum(run.width * run.count for run in runs)
        if held != view.span or different != held:
            raise ValueError(f"{who} {different} of {view.span} elements, {held - different} of them twice, {of}")
    return unit


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
