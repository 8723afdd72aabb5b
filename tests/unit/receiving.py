# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks that bring tensors to the model of one engine rank, without a channel."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View, numbers_of
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.transport.agreement import Agreement, Ranks
from verl_sync_plugin.transport.memory import Location, ParameterLocator, Regions
from verl_sync_plugin.transport.protocol import Committed, Manifest
from verl_sync_plugin.verify import Comparison

CPU, BF16, WORLD = torch.device("cpu"), torch.bfloat16, 3
Weights = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]


def map_of(model: torch.nn.Module, names: Iterable[str], shape: tuple[int, ...], dtype: torch.dtype = BF16) -> LoadMap:
    """Returns what an engine rank finds out about tensors of one shape."""
    numel, kind = math.prod(shape), str(dtype).removeprefix("torch.")
    bases = [Base(name, kind, dtype.itemsize, (numel,), (View(name, shape, 0, numel),)) for name in names]
    load = ModelLoad(SGLangModel(model, 0), Manifest.of(plan_buckets(tuple(bases), 1 << 20)), CPU)
    load.begin()
    return load.map


def comparison_of(found: LoadMap, plan: Plan, refuses: bool = True, restores: bool = True, **config: Any) -> Comparison:
    """What a trainer rank makes of the load map of its engine rank; it ``refuses`` a map that leaves something out."""
    ranks = Ranks(0, (0,), (0,))
    ranks.trainers = tuple(range(WORLD))
    comparison = Comparison(SyncConfig(**config), Agreement(10.0, ranks=ranks), (0,) if refuses else (), restores)
    comparison.note(found)
    comparison.learn(plan)
    return comparison


class Sender:
    """Shares out tensors over three ranks, cut anywhere or held by all; those of one tuple of ``names`` are tied."""

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        shape: tuple[int, ...],
        bucket_bytes: int = 1 << 20,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        chance, numel = random.Random(seed), math.prod(shape)
        self.shape, self.names, self.shards = shape, names, [list[Shard]() for _ in range(WORLD)]
        for number, tied in enumerate(names):
            cuts = sorted(chance.randint(0, numel) for _ in range(WORLD - 1))
            lengths = tuple(b - a for a, b in itertools.pairwise([0, *cuts, numel]))
            lengths = chance.choice([lengths, lengths, (numel,), (0, numel, 0)])
            base = Base(tied[0], "bfloat16", 2, lengths, tuple(View(name, shape, 0, numel) for name in tied))
            dtype = chance.choice([BF16, torch.float32])
            for rank in range(WORLD):
                path = folder and folder / f"{number}-{rank}"
                run = memory_for(lengths[rank % len(lengths)], dtype, path, 16 * chance.randint(0, 3))
                self.shards[rank].append(Shard(base, lambda run=run: run, run=run))  # type: ignore[misc]
        self.plan: Plan = plan_buckets(tuple(shard.base for shard in self.shards[0]), bucket_bytes, True)
        self._packers = [Packer(CPU, self.plan, rank) for rank in range(WORLD)]
        self.parameters = [ParameterLocator(CPU, self.plan, rank) for rank in range(WORLD)]

    def receiver(self, model: torch.nn.Module) -> ModelLoad:
        return ModelLoad(SGLangModel(model, 0), Manifest.of(self.plan), CPU)

    def train(self, seed: int) -> Tensors:
        """Gives every tensor new values, and returns them by all names."""
        generator, values = torch.Generator().manual_seed(seed), Tensors()
        for place, tied in enumerate(self.names):
            value = torch.randn(self.shape, generator=generator).to(BF16)
            values |= dict.fromkeys(tied, value)
            for rank, shards in enumerate(self.shards):
                lengths = shards[place].base.lengths
                first = sum(lengths[:rank]) if len(lengths) > 1 else 0
                run = shards[place].local()
                run.copy_(value.view(-1)[first : first + run.numel()])
        return values

    def staged(self, *loads: ModelLoad) -> None:
        """One sync of engine ranks that read the same slots, which are filled again and again."""
        for load in loads:
            load.begin()
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8) for _ in range(WORLD)]
        for packer in self._packers:
            packer.begin()
        for index, bucket in enumerate(self.plan.buckets):
            for packer, slot, shards in zip(self._packers, slots, self.shards, strict=True):
                packer.pack(index, slot, shards)
            for place, load in enumerate(loads):
                load.load(index, slots if bucket.world > 1 else slots[place : place + 1])
            for slot in slots:
                slot.fill_(0xEE)
        for load in loads:
            load.finish()

    def in_place(self, load: ModelLoad, place: int, locations: Sequence[Location] = ()) -> None:
        """Syncs once from the parameters' own memory, as ``place`` reads it; ``locations`` replaces what was found."""
        found = [mine.locate(shards) for mine, shards in zip(self.parameters, self.shards, strict=True)]
        regions = Regions()
        regions.map(region for location in found for region in location.regions)
        for packer, mine, shards in zip(self._packers, self.parameters, self.shards, strict=True):
            packer.begin()
            packer.hash_parameters(shards, mine.found)
        load.begin()
        assert not load.obstacle
        load.load_in_place(locations or found, place, regions)
        load.finish()

    def compared(self, load: ModelLoad) -> set[str]:
        """Names of the tensors that could be compared, and hold what was sent."""
        comparison = comparison_of(load.map, self.plan, refuses=False, verify="never")
        sent = torch.stack([packer.sums() for packer in self._packers]).sum(0)
        comparison.compare(comparison.weighed(sent, Committed(sums=load.sums(), held=load.held()), True))
        names = list(numbers_of(bucket.entries for bucket in load.manifest.buckets))
        return {names[number] for number in comparison.compared}


def memory_for(numel: int, dtype: torch.dtype, path: Path | None, before: int = 0) -> torch.Tensor:
    """Returns memory for a run; in a file, it begins ``before`` bytes after the first."""
    if path is None:
        return torch.zeros(numel, dtype=dtype)
    storage = torch.UntypedStorage.from_file(str(path), True, before + numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, before // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]
