# SPDX-License-Identifier: Apache-2.0
"""A source whose LoRA weights are merged while they are packed.

Only the small factors are gathered, whole, for the weights of a few buckets at a time; the base stays sharded and is
never written. So there is nothing to back up or restore, and a failure leaves the trainer as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import TURN_OFF, SyncConfig
from verl_sync_plugin.copies.packing import chunks_of
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base
from verl_sync_plugin.lora.merge import Steps, Target, Weight, add_squares, steps_of
from verl_sync_plugin.lora.scratch import Scratch, full_precision
from verl_sync_plugin.lora.weights import LoRAWeight, refuse_incomplete
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.bounded import take_part
from verl_sync_plugin.trainers.factors import GATHER_BYTES, FactorStore, adapter_parts, bases_ahead
from verl_sync_plugin.trainers.slicing import Part
from verl_sync_plugin.trainers.untying import untied, without_adapters

Place = tuple[int, int]  # first element in a run, and how many
Merge = Callable[[torch.Tensor, int], torch.Tensor]  # see ``Shard.merge``


@dataclass(frozen=True)
class _Recipe:
    """What becomes of one base of the trainer; holds as long as that base stays what it is.

    Attributes:
        base: the trainer's.
        factors: adapter parameters in it.
        exported: what travels, with the adapted weights inside, and what merges them.
    """

    base: Base
    factors: tuple[tuple[str, Part], ...]
    exported: tuple[tuple[Part, tuple[Target, ...], Merge | None], ...]


class MergingSource(ParameterSource):
    """Wraps the source of a PEFT model.

    Peak device memory beside the buckets: ``gather_bytes``, or the factors of one bucket's weights where those are
    larger, twice, and this rank's part of them once more; in fp32 ``LONGEST_CHUNK`` elements and two rows; of weights
    that are not ``plain`` three times ``LONGEST_CHUNK`` elements, and of fused experts at least one whole expert.

    Args:
        inner: yields all bases, adapters under their PEFT keys.
        weights: the adapted weights, named like ``inner`` names them.
        device: where packing happens.
        merge: False yields the base as it is, for an engine that serves the adapter itself.
        gather_bytes: of whole factors in fp32, gathered ahead; the same on all ranks.
        still: raises when ``weights`` are not what the trainer adapts any more; asked in every sync.
        timeout_seconds: bound on waiting for other ranks.
    """

    def __init__(
        self,
        inner: ParameterSource,
        weights: list[LoRAWeight],
        device: torch.device,
        merge: bool = True,
        gather_bytes: int = GATHER_BYTES,
        still: Callable[[], None] = lambda: None,
        timeout_seconds: float = SyncConfig.timeout_seconds,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._weights = {weight.name: weight for weight in weights}
        self._device = device
        self._merges = merge
        self._gather_bytes = gather_bytes
        self._still = still
        self._timeout = timeout_seconds
        self.factors = FactorStore(device, timeout_seconds)
        self._scratch = Scratch(device)
        self.exported: list[tuple[Shard, tuple[Target, ...]]] = []  # what travels, and what is merged into it
        self._recipes: dict[str, _Recipe] = {}
        self._sizes: dict[str, int] = {}
        self._checked = False
        self._prepared: frozenset[int] = frozenset()
        self.gathered: dict[str, torch.Tensor] = {}  # whole factors that are there now, by state-dict key
        self._scales: dict[str, torch.Tensor] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._inner.group

    def release(self) -> None:
        self.factors.clear()
        self._scratch.release()
        self.exported = []
        self._prepared, self.gathered, self._scales = frozenset(), {}, {}
        self._inner.release()

    def shards(self) -> list[Shard]:
        self.release()
        self._still()
        shards: list[Shard] = []
        for shard in self._inner.shards():
            recipe = self._recipes.get(shard.base.key)
            if recipe is None or recipe.base is not shard.base:
                recipe = self._recipes[shard.base.key] = self._recipe(shard)
                self._checked, self._sizes = False, {}
            for name, part in recipe.factors:
                self.factors.keep(name, part.of(shard))
            for piece, targets, merge in recipe.exported:
                found = piece.of(shard)
                self.exported.append((found, targets))
                if merge is not None:
                    found = Shard(found.base, found.local, merge, found.members, found.run)
                shards.append(found)
        if not self._checked:
            self._check_complete()
        return shards

    def _recipe(self, shard: Shard) -> _Recipe:
        rank = self._rank(shard.base)
        parts = [part for part in untied(without_adapters(shard), rank, self._weights) if part.base.views]
        targeted = ((part, self._targets(part)) for part in parts)
        exported = tuple((part, targets, self._merge_of(part.base, targets)) for part, targets in targeted)
        return _Recipe(shard.base, adapter_parts(shard, rank), exported)

    def _targets(self, part: Part) -> tuple[Target, ...]:
        found: dict[int, Target] = {}
        for member in part.members:
            weight = self._weights.get(member.name)
            if weight is not None:
                if self._merges and member.strides is not None:
                    raise ValueError(
                        f"LoRA weight {member.name!r} of shape {member.shape} has strides {member.strides}: weight "
                        f"sync merges into contiguous weights. Make it contiguous() in the model, or {TURN_OFF}."
                    )
                found.setdefault(member.start, Target(weight, member.start, member.shape))
        return tuple(found.values())

    def _merge_of(self, base: Base, targets: tuple[Target, ...]) -> Merge | None:
        return partial(self._merge, self._first(base), targets, {}) if targets and self._merges else None

    def _check_complete(self) -> None:
        found = {target.weight.name for _, targets in self.exported for target in targets}
        refuse_incomplete(self._weights, found, self.factors.names)
        self._checked = True

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective: gathers the factors of every adapted weight in these bases, and DoRA's norms; those of the next
        buckets as well, as long as all of them stay within ``gather_bytes``."""
        if not self._merges or self._prepared.issuperset(bases):
            return
        self._prepared, self.gathered, self._scales = frozenset(), {}, {}  # before more is taken
        chosen = bases_ahead(bases, ahead, self._nbytes, self._gather_bytes)
        parts = [self.exported[base] for base in chosen]
        keys = [key for base in chosen for key in self._keys(base)]
        self.gathered = yield from self.factors.gather(tuple(dict.fromkeys(keys)), self.group, torch.float32)
        self._scales = yield from self._dora_scales(parts)
        self._prepared = frozenset(chosen)  # last: what a failure leaves is no preparation

    def _nbytes(self, base: int) -> int:
        """Bytes of the whole factors of a base, in fp32."""
        return sum(self._size(target.weight) for target in self.exported[base][1])

    def _size(self, weight: Weight) -> int:
        size = self._sizes.get(weight.name)
        if size is None:
            size = self._sizes[weight.name] = self.factors.nbytes(weight.keys, torch.float32.itemsize)
        return size

    def _keys(self, base: int) -> tuple[str, ...]:
        """State-dict keys of what is merged into a base."""
        return tuple(key for target in self.exported[base][1] for key in target.weight.keys)

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        return [(key, self.factors.local(key)) for base in bases for key in self._keys(base)]

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
            take_part(dist.all_reduce(sums, group=self.group, async_op=True), self._device, self._timeout)
        magnitudes = (self.gathered[target.weight.magnitude or ""] for _, target in todo)
        return {
            target.weight.name: magnitude.reshape(-1) / piece.sqrt()
            for (_, target), magnitude, piece in zip(todo, magnitudes, pieces, strict=True)
        }

    def _add_squares(self, shard: Shard, target: Target, sums: torch.Tensor) -> None:
        run, first = shard.local(), self._first(shard.base)
        for begin, count in chunks_of(run.numel()):
            chunk = run[begin : begin + count]
            if target.overlaps(first + begin, chunk.numel()):
                copied = chunk.to(self._device, torch.float32, copy=True)
                with full_precision():
                    add_squares(copied, first + begin, target, self.gathered, sums)

    def _rank(self, base: Base) -> int:
        return dist.get_rank(self.group) if len(base.lengths) > 1 else 0

    def _first(self, base: Base) -> int:  # element of this rank's run
        return sum(base.lengths[: self._rank(base)])

    def _merge(
        self, first: int, targets: tuple[Target, ...], known: dict[Place, Steps], part: torch.Tensor, begin: int
    ) -> torch.Tensor:
        """Args: ``known``: the steps of this base's parts, kept from sync to sync."""
        place = begin, part.numel()
        steps = known.get(place)
        if steps is None:
            steps = known[place] = steps_of(targets, first + begin, part.numel())
        return self._scratch.merge(part, steps, self.gathered, self._scales)
