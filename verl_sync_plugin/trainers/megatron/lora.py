# SPDX-License-Identifier: Apache-2.0
"""A Megatron source whose LoRA weights are merged while they are packed, each rank its own parts.

A part of a weight needs one factor whole and of the other the rows or columns that match it, which the rank has: of a
column-parallel weight A is gathered, of a row-parallel one B. What is gathered comes from the tensor-parallel ranks
only, for the weights of a few buckets at a time. The base is never written, and no weight is ever whole.

Source: ``LoRAMerge.merge`` of ``megatron.bridge.peft.lora`` for which factor is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.lora.merge import Steps, Target, steps_of
from verl_sync_plugin.lora.scratch import Scratch
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.factors import FactorStore, bases_ahead
from verl_sync_plugin.trainers.megatron.adapters import AdaptedWeight, adapted_weights
from verl_sync_plugin.trainers.megatron.model import flat
from verl_sync_plugin.trainers.megatron.source import MegatronSource
from verl_sync_plugin.trainers.megatron.trace import NotACopyError

_KINDS = ("", "tensor", "expert")  # by whose ranks the factors of a weight are split


class MegatronLoRASource(MegatronSource):
    """Args: as of ``MegatronSource``; ``device`` where packing happens; ``timeout_seconds`` bound on waiting for other
    ranks."""

    def __init__(self, *args: Any, device: torch.device, timeout_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._weights: dict[int, AdaptedWeight] = {}  # of this rank, by place
        self._by_name: dict[str, AdaptedWeight] = {}
        self._adapted: dict[int, tuple[str, str, int]] = {}  # of all ranks: base -> name, kind, bytes of its factors
        self.factors = FactorStore(device, timeout_seconds)
        self._scratch = Scratch(device)
        self._steps: dict[int, dict[tuple[int, int], Steps]] = {}
        self._prepared: frozenset[int] = frozenset()
        self.gathered: dict[str, torch.Tensor] = {}

    def _read(self, run: str) -> None:
        self._adapted, self._steps = {}, {}
        super()._read(run)
        if self._layout.computed:
            return
        names = {place: name for name, place in self._places.items()}
        try:
            self._weights = adapted_weights(self._model, names)
        except NotACopyError as error:
            self._layout = replace(self._layout, computed=str(error))
            return
        self._by_name = {weight.name: weight for weight in self._weights.values()}
        described = (
            replace(parameter, adapter=self._described(self._by_name.get(parameter.name)))
            for parameter in self._layout.parameters
        )
        self._layout = replace(self._layout, parameters=tuple(described))

    def _described(self, weight: AdaptedWeight | None) -> tuple[str, int] | None:
        if weight is None:
            return None
        split = _size(weight) > 1
        return (_KINDS[1 + weight.experts] if split else ""), weight.rank

    def _note(self, index: int, unit: Any) -> None:
        """Called for every base, on every rank."""
        if unit.like.adapter is not None:
            kind, rank = unit.like.adapter
            rows, columns = unit.like.shape
            self._adapted[index] = unit.like.name, kind, rank * (rows + columns) * torch.float32.itemsize

    def release(self) -> None:
        self._scratch.release()
        self.factors.clear()
        self._prepared, self.gathered = frozenset(), {}
        super().release()

    def shards(self) -> list[Shard]:
        self.release()
        offloaded = self._model.offloaded()
        for weight in self._weights.values():
            for key, place in ((weight.a, weight.place_a), (weight.b, weight.place_b)):
                if key not in self.factors.names:
                    self.factors.keep(key, self._factor(weight, key, place, offloaded))
        return super().shards()

    def _factor(self, weight: AdaptedWeight, key: str, place: int, offloaded: dict[int, torch.Tensor]) -> Shard:
        """This rank's part of a factor; parts are rows, so one after another they are the whole."""
        tensor = self._model.tensors[place]
        home = offloaded.get(tensor.untyped_storage()._cdata)
        each = tensor if weight.expert is None else tensor[weight.expert]
        rows, columns = each.shape
        size = 1
        if key == weight.a and rows != weight.rank:
            size = weight.rank // rows
        elif key == weight.b and rows != self._rows(weight):
            size = self._rows(weight) // rows
        view = View(key, (rows * size, columns), 0, rows * size * columns)
        base = Base(key, dtype_name(tensor.dtype), tensor.dtype.itemsize, (rows * columns,) * size, (view,))
        return Shard(base, partial(flat, each, home))

    def _rows(self, weight: AdaptedWeight) -> int:
        """Rows of this rank's part of a weight."""
        return self._model.tensors[self._places[weight.name]].shape[0]

    def _shard(self, index: int, offloaded: dict[int, torch.Tensor]) -> Shard:
        shard = super()._shard(index, offloaded)
        weight = self._weights.get(self._mine.get(index, -1))
        if weight is not None:
            shape = tuple(self._model.tensors[self._mine[index]].shape)
            known = self._steps.setdefault(index, {})
            shard.merge = partial(self._merge, (Target(weight, 0, shape),), known)
        return shard

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective: gathers the factors of every adapted weight in these bases; those of the next buckets as well, as
        long as all of them stay within ``GATHER_BYTES``."""
        if self._prepared.issuperset(bases):
            return
        self._prepared, self.gathered = frozenset(), {}  # before more is taken
        chosen = bases_ahead(bases, ahead, lambda base: self._adapted[base][2] if base in self._adapted else 0)
        adapted = [self._adapted[base] for base in chosen if base in self._adapted]
        for kind in _KINDS:
            names = [name for name, split, _ in adapted if split == kind]
            if names:
                self.gathered.update((yield from self._gather(names, kind)))
        self._prepared = frozenset(chosen)  # last: what a failure leaves is no preparation

    def _gather(self, names: list[str], kind: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        """Whole factors of those of the weights that this rank and its group hold parts of. Every rank yields once
        where any has something to gather."""
        mine = [self._by_name[name] for name in names if name in self._by_name]
        keys = tuple(dict.fromkeys(key for weight in mine for key in weight.keys))
        work = self.factors.gather(keys, _group(kind), torch.float32)
        found = _advance(work)  # up to its collective
        if kind:
            yield
        if found is None:
            found = _advance(work)
        assert found is not None, "factors that are split over one group have one dtype"
        return found

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        weights = [self._weights[self._mine[base]] for base in bases if self._mine.get(base) in self._weights]
        return [(key, self.factors.local(key)) for weight in weights for key in weight.keys]

    def _merge(
        self, targets: tuple[Target, ...], known: dict[tuple[int, int], Steps], part: torch.Tensor, begin: int
    ) -> torch.Tensor:
        place = begin, part.numel()
        steps = known.get(place)
        if steps is None:
            steps = known[place] = steps_of(targets, begin, part.numel())
        return self._scratch.merge(part, steps, self.gathered, {})


def _advance(work: Generator[None, None, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
    """Goes on to the next collective; returns the result when there is none left."""
    try:
        next(work)
    except StopIteration as end:
        found: dict[str, torch.Tensor] = end.value
        return found
    return None


def _group(kind: str) -> dist.ProcessGroup | None:
    from megatron.core import parallel_state as mpu

    groups = {"tensor": mpu.get_tensor_model_parallel_group, "expert": mpu.get_expert_tensor_parallel_group}
    return groups[kind]() if kind else None


def _size(weight: AdaptedWeight) -> int:
    return dist.get_world_size(_group(_KINDS[1 + weight.experts]))
