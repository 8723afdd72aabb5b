"""The copy plan on SGLang's own model classes: a replay gives what the model's own ``load_weights`` gives, bit for bit.

Sender and receiver are the real ones without a channel: ``Packer`` fills the buckets of every trainer rank,
``Unpacker`` loads them. Each tensor-parallel rank is a process; all models take turns in it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contract import sglang_models as models
from verl_sync_plugin.bucket import Base, Plan, View
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.planner import plan_buckets
from verl_sync_plugin.receiver import copy_plan, unpacker
from verl_sync_plugin.receiver.copy_plan import CopyPlan
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.unpacker import Unpacker
from verl_sync_plugin.sharding_manager.agreement import Agreement
from verl_sync_plugin.sharding_manager.hash_check import HashCheck, paired
from verl_sync_plugin.source.base import Shard, dtype_name
from verl_sync_plugin.source.fsdp2 import even_chunks
from verl_sync_plugin.transport.packing import Packer
from verl_sync_plugin.transport.protocol import Committed, Coverage, Manifest

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
# trainer ranks, bucket size, sharded: whole tensors in one piece; many torn ones; a few
CUTS = ((1, 1 << 30, False), (3, 20_000, True), (2, 1 << 16, False))


class Wire:
    """Brings checkpoints to one model the way trainer ranks do."""

    def __init__(
        self, model: Any, weights: models.Weights, ranks: int, bucket_bytes: int, sharded: bool = False
    ) -> None:
        self.model = model
        self._ranks = ranks
        bases = tuple(self._base(name, tensor) for name, tensor in weights)
        self.plan: Plan = plan_buckets(bases, bucket_bytes, sharded)
        self._packers = [Packer(CPU, self.plan, hashed=True) for _ in range(ranks)]
        self.unpacker = Unpacker(model, Manifest.of(self.plan), CPU)
        self.coverage = Coverage(0, ())
        self.check = HashCheck(Agreement(60.0))

    def _base(self, name: str, tensor: torch.Tensor) -> Base:
        lengths = even_chunks(tensor.shape[0], self._ranks, tensor.numel() // tensor.shape[0])
        views = (View(name, tuple(tensor.shape), 0, tensor.numel()),)
        return Base(name, dtype_name(tensor.dtype), tensor.element_size(), lengths, views)

    def _shards(self, weights: models.Weights, rank: int) -> list[Shard]:
        shards = []
        for base, (_, tensor) in zip(self.plan.bases, weights, strict=True):
            run = tensor.reshape(-1)[sum(base.lengths[:rank]) :][: base.lengths[rank]]
            shards.append(Shard(base, lambda run=run: run))  # type: ignore[misc]
        return shards

    def sync(
        self, weights: models.Weights, spoil: Callable[[torch.Tensor], None] = lambda memory: None
    ) -> tuple[int, int]:
        """One sync into memory that holds rubbish; returns what was replayed."""
        models.poison(self.model)
        shards = [self._shards(weights, rank) for rank in range(self._ranks)]
        for packer in self._packers:
            packer.begin()
        self.unpacker.begin(copy_plan=True, hashed=True, whole=self.check.whole(self.plan))
        ledger = None if self.unpacker.settled else Ledger(self.model)
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8)]
        slots += [slots[0].clone() for _ in range(self._ranks - 1)] if self.plan.sharded else []
        with ledger or nullcontext():
            for index, bucket in enumerate(self.plan.buckets):
                for rank, packer in enumerate(self._packers):
                    packer.pack(bucket, slots[rank % len(slots)], shards[rank], rank)
                spoil(slots[0])
                self.unpacker.load(index, slots)
                for slot in slots:
                    slot.fill_(0xEE)  # used again
        replayed = self.unpacker.replayed
        self._compare()
        self.unpacker.finish(ledger)
        if ledger is not None:
            self.coverage = ledger.coverage()
        return replayed

    def _compare(self) -> None:
        """The hashes, as the trainer ranks compare them; every model rank holds all packers, as many as its world."""
        readings = self.unpacker.readings()
        if readings is not None:
            self.unpacker.told(readings)
            self.check.note(Committed(self.coverage, readings=readings))
            self.check.learn(self.plan)
            self.check._times_sent = torch.full_like(self.check._times_sent, dist.get_world_size())
        sent = torch.stack([packer.sums() for packer in self._packers]).sum(0)
        self.check.compare(paired(sent, Committed(self.coverage, sums=self.unpacker.sums())))


def assert_same(model: Any, reference: Any, what: str) -> None:
    ours, theirs = models.held(model), models.held(reference)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{what}: {different[:8]}"


def replays_are_exact(kind: str, config: Any) -> None:
    """Three syncs of every cut: the first is the model's own, the others are replayed whole."""
    model, reference = models.build(config), models.build(config)
    for ranks, bucket_bytes, sharded in CUTS:
        wire = Wire(model, models.weights_of(kind, 0), ranks, bucket_bytes, sharded)
        nbytes = sum(tensor.nbytes for _, tensor in models.weights_of(kind, 0))
        for seed in (1, 2, 3):
            weights = models.weights_of(kind, seed)
            replayed = wire.sync(weights)
            assert replayed == ((0, 0) if seed == 1 else (len(weights), nbytes)), (kind, ranks, seed, replayed)
            reference.load_weights(iter(weights))
            assert_same(model, reference, f"{kind}, {ranks} ranks, {bucket_bytes} bytes, sync {seed}")
        assert wire.coverage.expected > 10 and not wire.coverage.missing, (kind, wire.coverage)


def moved_parameters_start_over(kind: str, config: Any) -> None:
    """``param.data = tensor`` makes no operation, yet the sync after it replays nothing, and the next one does."""
    model, reference = models.build(config), models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)
    counts = []
    for seed in range(1, 6):
        if seed == 3:
            moved = model.model.layers[1].mlp.gate_up_proj.weight
            moved.data = moved.data.clone()
        counts.append(wire.sync(models.weights_of(kind, seed))[0] > 0)
        reference.load_weights(iter(models.weights_of(kind, seed)))
        assert_same(model, reference, f"{kind}, sync {seed}")
    assert counts == [False, True, False, True, True]


def moved_experts_start_over(kind: str, config: Any) -> None:
    """Expert load balancing changes what a place holds, not where it is."""
    from sglang.srt.eplb import expert_location

    model = models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 1, 1 << 20)
    placed = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([[1, 0]]))
    assert wire.sync(models.weights_of(kind, 1)) == (0, 0) != wire.sync(models.weights_of(kind, 2))
    with mock.patch.object(expert_location, "get_global_expert_location_metadata", lambda: placed):
        assert wire.sync(models.weights_of(kind, 3)) == (0, 0) != wire.sync(models.weights_of(kind, 4))


def _plus_one(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded + 1)


def others_take_the_models_own_way(kind: str, config: Any) -> None:
    """Names that the model computes with, transposes or reads on the host are loaded by it; the rest is replayed."""
    model, reference = models.build(config), models.build(config)
    for each in (model, reference):
        each.model.norm.weight.weight_loader = _plus_one
    wire = Wire(model, models.weights_of(kind, 0), 3, 20_000)
    for seed in (1, 2, 3):
        weights = models.weights_of(kind, seed)
        tensors, _ = wire.sync(weights)
        assert tensors == (0 if seed == 1 else len(weights) - 1)
        reference.load_weights(iter(weights))
        assert_same(model, reference, f"{kind}, sync {seed}")
    assert set(wire.unpacker._plan.refused) == {"model.norm.weight"}


def a_model_that_keeps_tensors_is_not_planned(kind: str, config: Any) -> None:
    """Neither as a parameter's data nor as an attribute: bytes of a slot are only lent."""
    sources = [copy_plan.Source(n, t.dtype, tuple(t.shape), None) for n, t in models.weights_of(kind, 0)]
    keepers = (
        ("cannot be recorded", lambda parameter, loaded: setattr(parameter, "data", loaded)),
        ("keeps model.norm.weight", lambda parameter, loaded: setattr(norm, "seen", loaded)),
    )
    for why, keep in keepers:
        model = models.build(config)
        norm = model.model.norm
        norm.weight.weight_loader = keep
        plan = copy_plan.make_plan(model, sources)
        assert not plan.planned and len(plan.refused) == len(sources)
        assert all(why in reason for reason in plan.refused.values()), plan.refused


def a_wrong_plan_is_found(kind: str, config: Any) -> None:
    """What a replay would write is compared with what the model wrote, before anything is replayed."""
    model, reference = models.build(config), models.build(config)
    honest = unpacker.make_plan
    swapped = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]

    def wrong(*args: Any) -> CopyPlan:
        plan = honest(*args)
        first, second = swapped
        plan.planned[first], plan.planned[second] = plan.planned[second], plan.planned[first]
        return plan

    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)
    with mock.patch.object(unpacker, "make_plan", wrong):
        for seed in (1, 2):
            weights = models.weights_of(kind, seed)
            tensors, _ = wire.sync(weights)
            reference.load_weights(iter(weights))
            assert_same(model, reference, f"{kind}, sync {seed}")
    assert tensors == len(weights) - 2 and set(wire.unpacker._plan.refused) == set(swapped)


def changed_bytes_are_found(kind: str, config: Any) -> None:
    """One flipped bit between packing and loading, in a replay and in the model's own load."""
    model = models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)

    def flip(memory: torch.Tensor) -> None:
        memory[4097] ^= 4

    for _ in range(2):
        with pytest.raises(SyncError, match=r"the bytes of model\.[a-z0-9_., ]+ changed on the way"):
            wire.sync(models.weights_of(kind, 1), flip)
        wire.sync(models.weights_of(kind, 2))
    assert wire.sync(models.weights_of(kind, 3))[0] > 0


def unevenly_read_tensors_are_hashed_whole(kind: str, config: Any) -> None:
    """Not compared in the sync that finds it out; from the next one on every rank hashes all of it, and is compared."""
    if dist.get_world_size() == 1:
        return
    model, name = models.build(config), "model.layers.0.mlp.down_proj.weight"
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)
    number = [n for n, _ in models.weights_of(kind, 0)].index(name)
    honest = wire.check._agreement.gather

    def uneven(what: str, value: Any) -> Any:
        nbytes, lines = next((nbytes, lines) for nbytes, lines, numbers in value if number in numbers)
        return [*honest(what, value), ((nbytes, lines[:1], (number,)),)]

    with mock.patch.object(wire.check._agreement, "gather", uneven):
        wire.sync(models.weights_of(kind, 1))
    assert wire.check.whole(wire.plan) == (number,)
    read = wire.unpacker._replay.traffic(0, True) if wire.unpacker._replay else (0, 0)
    for seed in (2, 3):
        assert wire.sync(models.weights_of(kind, seed))[0] > 0
    assert wire.unpacker._replay is not None and wire.unpacker._replay.traffic(0, True) > read, "reads all of it"
    assert int(wire.check._times_read[number]) == 2 and wire.check.whole(wire.plan) == (number,)


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One tensor-parallel rank; entry of a spawned process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for kind in models.CONFIGS:
            replays_are_exact(kind, models.start(Path(folder), kind, rank, world, port))
        config = models.start(Path(folder), "qwen2", rank, world, port)
        for story in (
            moved_parameters_start_over,
            moved_experts_start_over,
            others_take_the_models_own_way,
            a_model_that_keeps_tensors_is_not_planned,
            a_wrong_plan_is_found,
            changed_bytes_are_found,
            unevenly_read_tensors_are_hashed_whole,
        ):
            story("qwen2", config)


@pytest.mark.parametrize("world", [1, 2])
def test_every_model(world: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(world, str(tmp_path), port), nprocs=world)
