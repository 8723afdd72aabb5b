# SPDX-License-Identifier: Apache-2.0
"""Parameters read where they lie are the bytes, and give the hashes, that packing and loading buckets would."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from receiving import Engine

from verl_sync_plugin.copies import copier as copiers
from verl_sync_plugin.copies import packing
from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.layout.load_map import owners_of, read_parts
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View, numbers_of
from verl_sync_plugin.transport import memory as cuda_driver
from verl_sync_plugin.transport.memory import Live, LiveParameters, NotInPlaceError, Regions
from verl_sync_plugin.transport.protocol import Manifest

CPU = torch.device("cpu")
WORLD = 3


@pytest.fixture(params=["plain", "kernel"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Copier]:
    """Both ways to copy; the kernel in Triton's interpreter, see ``test_copies.test_kernel_in_the_interpreter``."""
    if request.param == "kernel":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("runs again in a process of its own")
        for module in (copiers, packing):
            monkeypatch.setattr(module, "kernel_works", lambda device: True)
    return Copier


def in_file(values: torch.Tensor, path: Path, before: int) -> torch.Tensor:
    """The same values in a mapped file, some bytes after its first."""
    storage = torch.UntypedStorage.from_file(str(path), True, before + values.nbytes)
    offset = before // values.element_size()
    return torch.empty(0, dtype=values.dtype).set_(storage, offset, values.shape).copy_(values)


class Trainer:
    """Ranks with parameters of all kinds: sharded unevenly, in fp32 and bf16, tied, held by every rank."""

    def __init__(self, folder: Path, seed: int, bucket_bytes: int, sharded: bool = True) -> None:
        chance = random.Random(seed)
        self.full: dict[str, torch.Tensor] = {}
        self.shards: list[list[Shard]] = [[] for _ in range(WORLD)]
        for number in range(8):
            kind = chance.choice(["fp32", "bf16", "tied", "everywhere"])
            rows, columns = chance.randint(1, 40), 8 * chance.randint(1, 6)
            value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number)).bfloat16()
            trained = value.float() if kind == "fp32" else value
            step = -(-rows // WORLD)
            cuts = [max(min(step, rows - rank * step), 0) * columns for rank in range(WORLD)]
            lengths = (rows * columns,) if kind == "everywhere" else tuple(cuts)
            names = [f"w{number}"] + ([f"tied{number}"] if kind == "tied" else [])
            views = tuple(View(name, (rows, columns), 0, rows * columns) for name in names)
            base = Base(names[0], "bfloat16", 2, lengths, views)
            self.full |= dict.fromkeys(names, value)
            for rank in range(WORLD):
                first = sum(lengths[:rank]) if len(lengths) > 1 else 0
                mine = trained.reshape(-1)[first : first + lengths[rank % len(lengths)]]
                run = in_file(mine, folder / f"{seed}-{number}-{rank}", 16 * chance.randint(0, 3))
                self.shards[rank].append(Shard(base, lambda run=run: run, run=run))  # type: ignore[misc]
        self.plan: Plan = plan_buckets(tuple(part.base for part in self.shards[0]), bucket_bytes, sharded)

    def tell(self) -> list[Live]:
        return [LiveParameters(CPU, self.plan, rank).look(self.shards[rank]) for rank in range(WORLD)]


class Model(torch.nn.Module):
    """Takes every tensor whole, or as rows that lie apart."""

    def __init__(self, full: dict[str, torch.Tensor], chance: random.Random) -> None:
        super().__init__()
        self.targets = {}
        for name, value in full.items():
            apart = chance.choice([1, 2]) if value.shape[1] >= 16 else 1  # rows of 32 bytes at least
            parameter = torch.nn.Parameter(torch.zeros(apart * value.shape[0], value.shape[1]).bfloat16(), False)
            self.register_parameter(name, parameter)
            self.targets[name] = parameter.data[::apart]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.targets[name].copy_(tensor)


def loaded_in_place(trainer: Trainer, lives: list[Live], place: int, model: Model) -> ModelLoad:
    regions = Regions()
    regions.map(region for live in lives for region in live.regions)
    load = ModelLoad(Engine(model, 0), Manifest.of(trainer.plan), CPU)
    load.begin()
    assert not load.obstacle
    load.load_in_place(lives, place, regions)
    load.finish()
    return load


@pytest.mark.parametrize("place", range(WORLD))
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 700])
@pytest.mark.parametrize("seed", range(3))
def test_everything_arrives_with_its_hash(
    seed: int, bucket_bytes: int, place: int, copier: type[Copier], tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path, seed, bucket_bytes)
    model = Model(trainer.full, random.Random(seed))
    load = loaded_in_place(trainer, trainer.tell(), place, model)
    assert all(torch.equal(model.targets[name], value) for name, value in trainer.full.items())
    buckets = [bucket.entries for bucket in trainer.plan.buckets]
    owners, sent = owners_of(buckets), _sent(trainer, place)
    sums = torch.frombuffer(bytearray(load.sums()), dtype=torch.int64)
    owned = [number for number, _ in read_parts(load.map, buckets, owners)]
    assert all(int(value) == int(sent[number]) for number, value in zip(owned, sums, strict=True))
    assert set(owned) == set(owners.values())


def _sent(trainer: Trainer, place: int) -> torch.Tensor:
    """What the ranks hash; of what every rank holds, one of them."""
    everywhere = {base.key for base in trainer.plan.bases if len(base.lengths) == 1}
    names = list(numbers_of(bucket.entries for bucket in trainer.plan.buckets))
    total = torch.zeros(len(names), dtype=torch.int64)
    for rank in range(WORLD):
        packer = Packer(CPU, trainer.plan, rank)
        packer.begin()
        parameters = LiveParameters(CPU, trainer.plan, rank)
        parameters.look(trainer.shards[rank])
        packer.read(trainer.shards[rank], parameters.found)
        counts = torch.tensor([int(rank == place or name not in everywhere) for name in names])
        total += packer.sums() * counts
    return total


def test_told_again_only_when_something_moved(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, 700)
    mine, parameters = trainer.shards[0], LiveParameters(CPU, trainer.plan, 0)
    first = parameters.look(mine)
    assert parameters.look(mine) is first
    place = next(number for number, part in enumerate(mine) if part.local().numel())
    mine[place] = replace(mine[place], run=in_file(mine[place].local(), tmp_path / "moved", 0))
    assert parameters.look(mine).key != first.key


def test_says_what_cannot_be_read_and_why(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, 700)
    mine = trainer.shards[0]
    place = next(number for number, part in enumerate(mine) if part.local().numel())
    run, name = mine[place].local(), mine[place].base.key
    cases = {
        "private to the trainer's process": replace(mine[place], run=run.clone()),
        "is merged with its adapter": replace(mine[place], merge=lambda part, begin: part),
        "is torch.float64 and travels as bfloat16": replace(mine[place], run=run.double(), local=run.double),
    }
    for why, spoiled in cases.items():
        shards = [*mine[:place], spoiled, *mine[place + 1 :]]
        with pytest.raises(NotInPlaceError, match=f"'{name}'.*{why}"):
            LiveParameters(CPU, trainer.plan, 0).look(shards)


def test_bytes_that_nobody_told_of_are_an_error(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, 1 << 20)
    lives = trainer.tell()
    for broken in ([replace(lives[0], runs=(b"",) * len(lives[0].runs)), *lives[1:]], [lives[1], lives[0], lives[2]]):
        with pytest.raises(ValueError, match="trainer rank"):
            loaded_in_place(trainer, broken, 0, Model(trainer.full, random.Random(0)))


def test_memory_is_mapped_once_and_given_up(tmp_path: Path) -> None:
    (live, *_), regions = Trainer(tmp_path, 2, 700).tell(), Regions()
    regions.map(live.regions)
    addresses = [regions.address(region) for region in live.regions]
    regions.map(live.regions)
    assert addresses == [regions.address(region) for region in live.regions]
    regions.map(live.regions[1:])
    with pytest.raises(KeyError):
        regions.address(live.regions[0])
    gone = replace(live.regions[0], key="gone", handle=("/gone",))
    with pytest.raises(FileNotFoundError, match="/gone"):
        regions.map([gone])


def test_without_a_cuda_driver_parameters_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD's devices, which torch calls cuda as well: an error of the kind that exporters and regions expect."""
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: os.stat(f"/{name}"))
    cuda_driver.driver.cache_clear()
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        cuda_driver.driver()
