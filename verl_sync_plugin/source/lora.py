"""A source whose LoRA weights are merged while they are packed.

Only the small factors are gathered, whole, for the weights of one bucket at a time; the base stays sharded and is never
written. So there is nothing to back up or restore, and a failure leaves the trainer as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from verl_sync_plugin.bucket import Base
from verl_sync_plugin.lora.merge import Target, add_squares
from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.lora.scratch import Scratch, full_precision
from verl_sync_plugin.lora.weights import LoRAWeight
from verl_sync_plugin.source.base import Member, ParameterSource, Shard
from verl_sync_plugin.source.factors import FactorStore, adapter_parts
from verl_sync_plugin.source.slicing import Part, part_of
from verl_sync_plugin.transport.packing import MERGE_CHUNK


@dataclass(frozen=True)
class _Recipe:
    """What becomes of one base of the trainer; holds as long as that base stays what it is.

    Attributes:
        base: the trainer's.
        factors: adapter parameters in it.
        exported: what travels, with the adapted weights inside.
    """

    base: Base
    factors: tuple[tuple[str, Part], ...]
    exported: tuple[tuple[Part, tuple[Target, ...]], ...]


class MergingSource(ParameterSource):
    """Wraps the source of a PEFT model.

    Peak device memory beside the buckets: the factors of one bucket's weights, twice, and, in fp32, ``MERGE_CHUNK``
    elements and two rows; of weights that are not ``plain`` three times ``MERGE_CHUNK`` elements, and of fused experts
    at least one whole expert. That is whatever the size of the model or its largest layer.

    Args:
        inner: yields all bases, adapters under their PEFT keys.
        weights: the adapted weights, named like ``inner`` names them.
        device: where packing happens.
        merge: False yields the base as it is, for an engine that serves the adapter itself.
    """

    def __init__(
        self, inner: ParameterSource, weights: list[LoRAWeight], device: torch.device, merge: bool = True
    ) -> None:
        super().__init__()
        self._inner = inner
        self._weights = {weight.name: weight for weight in weights}
        self._device = device
        self._merges = merge
        self.factors = FactorStore(device)
        self._scratch = Scratch(device)
        self._exported: list[tuple[Shard, tuple[Target, ...]]] = []
        self._recipes: dict[str, _Recipe] = {}
        self._checked = False
        self._gathered: dict[str, torch.Tensor] = {}
        self._scales: dict[str, torch.Tensor] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._inner.group

    def release(self) -> None:
        self.factors.clear()
        self._scratch.release()
        self._exported, self._gathered, self._scales = [], {}, {}
        self._inner.release()

    def shards(self) -> list[Shard]:
        self.release()
        for shard in self._inner.shards():
            recipe = self._recipes.get(shard.base.key)
            if recipe is None or recipe.base is not shard.base:
                recipe = self._recipes[shard.base.key] = self._recipe(shard)
                self._checked = False
            for name, part in recipe.factors:
                self.factors.keep(name, part.of(shard))
            self._exported.extend((part.of(shard), targets) for part, targets in recipe.exported)
        if not self._checked:
            self._check_complete()
        return [self._merging(shard, targets) for shard, targets in self._exported]

    def _recipe(self, shard: Shard) -> _Recipe:
        rank = self._rank(shard.base)
        parts = [part for part in _untied(_without_adapters(shard), rank, self._weights) if part.base.views]
        exported = tuple((part, self._targets(part)) for part in parts)
        return _Recipe(shard.base, adapter_parts(shard, rank), exported)

    def _targets(self, part: Part) -> tuple[Target, ...]:
        found: dict[int, Target] = {}
        for member in part.members:
            weight = self._weights.get(member.name)
            if weight is not None:
                found.setdefault(member.start, Target(weight, member.start, member.shape))
        return tuple(found.values())

    def _merging(self, shard: Shard, targets: tuple[Target, ...]) -> Shard:
        if not targets or not self._merges:
            return shard
        return replace(shard, merge=partial(self._merge, self._first(shard.base), targets))

    def _check_complete(self) -> None:
        """An adapted weight that is not among the exported would travel unmerged."""
        found = {target.weight.name for _, targets in self._exported for target in targets}
        kept = self.factors.names
        lost = sorted(self._weights.keys() - found)
        lost += [key for weight in self._weights.values() for key in weight.keys if key not in kept]
        if lost:
            raise ValueError(f"LoRA parameters without a counterpart in the trainer's state: {', '.join(lost[:5])}")
        self._checked = True

    def prepare(self, bases: tuple[int, ...]) -> Generator[None, None, None]:
        """Collective: gathers the factors of every adapted weight in these bases, and DoRA's norms."""
        if not self._merges:
            return
        parts = [self._exported[base] for base in bases]
        keys = [key for _, targets in parts for target in targets for key in target.weight.keys]
        self._gathered = yield from self.factors.gather(tuple(dict.fromkeys(keys)), self.group, torch.float32)
        self._scales = yield from self._dora_scales(parts)

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        targets = [target for base in bases for target in self._exported[base][1]]
        return [(key, self.factors.local(key)) for target in targets for key in target.weight.keys]

    def _dora_scales(
        self, parts: list[tuple[Shard, tuple[Target, ...]]]
    ) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Magnitude over norm; a row may be spread over ranks, so the squares are summed over all of them."""
        todo = [(shard, target) for shard, targets in parts for target in targets if target.weight.magnitude]
        if not todo:
            return {}
        sums = torch.zeros(sum(target.scales for _, target in todo), device=self._device)
        pieces = sums.split([target.scales for _, target in todo])
        for (shard, target), piece in zip(todo, pieces, strict=True):
            self._add_squares(shard, target, piece)
            if len(shard.base.lengths) == 1 and self.group is not None:
                piece /= dist.get_world_size(self.group)  # every rank holds all of it
        if self.group is not None:
            yield
            dist.all_reduce(sums, group=self.group)
        magnitudes = (self._gathered[target.weight.magnitude or ""] for _, target in todo)
        return {
            target.weight.name: magnitude.reshape(-1) / piece.sqrt()
            for (_, target), magnitude, piece in zip(todo, magnitudes, pieces, strict=True)
        }

    def _add_squares(self, shard: Shard, target: Target, sums: torch.Tensor) -> None:
        run, first = shard.local(), self._first(shard.base)
        for begin in range(0, run.numel(), MERGE_CHUNK):
            chunk = run[begin : begin + MERGE_CHUNK]
            if target.overlaps(first + begin, chunk.numel()):
                copied = chunk.to(self._device, torch.float32, copy=True)
                with full_precision():
                    add_squares(copied, first + begin, target, self._gathered, sums)

    def _rank(self, base: Base) -> int:
        return dist.get_rank(self.group) if len(base.lengths) > 1 else 0

    def _first(self, base: Base) -> int:
        """The first element of this rank's run."""
        return sum(base.lengths[: self._rank(base)])

    def _merge(self, first: int, targets: tuple[Target, ...], part: torch.Tensor, begin: int) -> torch.Tensor:
        return self._scratch.merge(part, first + begin, targets, self._gathered, self._scales)


def _without_adapters(shard: Shard) -> Part:
    views = tuple(view for view in shard.base.views if not is_adapter(view.name))
    members = tuple(member for member in shard.members if not is_adapter(member.name))
    return Part(replace(shard.base, views=views), members)


def _untied(whole: Part, rank: int, weights: dict[str, LoRAWeight]) -> list[Part]:
    """Tied parameters of which only some are adapted, or each by its own adapter, travel apart: merged they differ."""
    apart: list[Member] = []
    owners: dict[int, Member] = {}
    for member in whole.members:
        owner = owners.setdefault(member.start, member)
        if weights.get(member.name) is not weights.get(owner.name):
            apart.append(member)
    if not apart:
        return [whole]
    names = {member.name for member in apart}
    rest = tuple(view for view in whole.base.views if view.name not in names)
    kept = tuple(member for member in whole.members if member.name not in names)
    parts = [Part(replace(whole.base, views=rest), kept)]
    for member in apart:
        view = next(view for view in whole.base.views if view.name == member.name)
        key = f"{whole.base.key} ({member.name})"
        parts.append(part_of(whole.base, rank, key, view.start, view.span, (view,), (replace(member, start=0),)))
    return parts
