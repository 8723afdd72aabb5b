# SPDX-License-Identifier: Apache-2.0
"""The copy plan on SGLang's own model classes: a replay gives what the model's own ``load_weights`` gives, bit for bit.

Sender and receiver are the real ones without a channel: ``Packer`` fills the buckets of every trainer rank,
``Unpacker`` loads them. Each tensor-parallel rank is a process; all models take turns in it.
"""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contract import odd_loaders
from contract import sglang_models as models
from contract.wire import Wire
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.receiver import copy_plan, unpacker
from verl_sync_plugin.receiver.copy_plan import CopyPlan
from verl_sync_plugin.rollouts.sglang.model import SGLangModel

pytestmark = pytest.mark.slow
# trainer ranks, bucket size, sharded: whole tensors in one piece; many torn ones; a few
CUTS = ((1, 1 << 30, False, True), (3, 20_000, True, False), (2, 1 << 16, False, False), (3, 20_000, True, True))


def assert_same(model: Any, reference: Any, what: str) -> None:
    ours, theirs = models.held(model), models.held(reference)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{what}: {different[:8]}"


def replays_are_exact(kind: str, config: Any) -> None:
    """Three syncs of every cut: all are replayed whole, but for a first one that no marks have proven."""
    model, reference = models.build(config), models.build(config)
    for ranks, bucket_bytes, sharded, verified in CUTS:
        wire = Wire(model, models.weights_of(kind, 0), ranks, bucket_bytes, sharded, verified=verified)
        nbytes = sum(tensor.nbytes for _, tensor in models.weights_of(kind, 0))
        for seed in (1, 2, 3):
            weights = models.weights_of(kind, seed)
            replayed = wire.sync(weights)
            at_once = verified or seed > 1
            assert replayed == ((len(weights), nbytes) if at_once else (0, 0)), (kind, ranks, seed, replayed)
            reference.load_weights(iter(weights))
            assert_same(model, reference, f"{kind}, {ranks} ranks, {bucket_bytes} bytes, sync {seed}")
        assert wire.coverage.expected > 10 and not wire.coverage.missing, (kind, wire.coverage)


def moved_parameters_start_over(kind: str, config: Any) -> None:
    """``param.data = tensor`` makes no operation, yet the sync after it has a new plan: one that marks prove is
    replayed at once, another from the next sync on."""
    for verified, expected in ((False, [False, True, False, True, True]), (True, [True] * 5)):
        assert moved_in_the_third(kind, config, verified) == expected


def moved_in_the_third(kind: str, config: Any, verified: bool) -> list[bool]:
    """Which of five syncs were replayed."""
    model, reference = models.build(config), models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16, verified=verified)
    counts = []
    for seed in range(1, 6):
        if seed == 3:
            moved = model.model.layers[1].mlp.gate_up_proj.weight
            moved.data = moved.data.clone()
        counts.append(wire.sync(models.weights_of(kind, seed))[0] > 0)
        reference.load_weights(iter(models.weights_of(kind, seed)))
        assert_same(model, reference, f"{kind}, sync {seed}")
    return counts


def moved_experts_start_over(kind: str, config: Any) -> None:
    """Expert load balancing changes what a place holds, not where it is."""
    from sglang.srt.eplb import expert_location

    model = models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 1, 1 << 20, verified=False)
    placed = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([[1, 0]]))
    assert wire.sync(models.weights_of(kind, 1)) == (0, 0) != wire.sync(models.weights_of(kind, 2))
    with mock.patch.object(expert_location, "get_global_expert_location_metadata", lambda: placed):
        assert wire.sync(models.weights_of(kind, 3)) == (0, 0) != wire.sync(models.weights_of(kind, 4))


def others_take_the_models_own_way(kind: str, config: Any) -> None:
    """Names that the model computes with, transposes or reads on the host are loaded by it; the rest is replayed."""
    model, reference = models.build(config), models.build(config)
    for each in (model, reference):
        each.model.norm.weight.weight_loader = odd_loaders.plus_one
    wire = Wire(model, models.weights_of(kind, 0), 3, 20_000)
    for seed in (1, 2, 3):
        weights = models.weights_of(kind, seed)
        tensors, _ = wire.sync(weights)
        assert tensors == (0 if seed == 1 else len(weights) - 1)
        reference.load_weights(iter(weights))
        assert_same(model, reference, f"{kind}, sync {seed}")
    assert set(wire.unpacker.plan.refused) == {"model.norm.weight"}


def what_a_replay_would_get_wrong_is_refused(kind: str, config: Any) -> None:
    """By what the load does, not by values: those of the first sync are such that a wrong replay gives them, too."""
    name = "model.norm.weight"
    loaders = (
        (odd_loaders.last_row_cleared, "is overwritten by a constant in part"),
        (odd_loaders.as_words, "is copied through a view of another dtype"),
        (odd_loaders.negated, "is copied through a view of another dtype"),
        (odd_loaders.changed_where_it_lies, "goes through aten.mul_.Tensor"),
        (odd_loaders.cleared_first, ""),
    )
    for loader, why in loaders:
        model, reference = models.build(config), models.build(config)
        for each in (model, reference):
            each.model.norm.weight.weight_loader = loader
        wire = Wire(model, models.weights_of(kind, 0), 1, 1 << 30)
        for seed in (1, 2, 3):
            weights = [(n, t * 0 if n == name and seed == 1 else t) for n, t in models.weights_of(kind, seed)]
            wire.sync(weights)
            reference.load_weights((n, t.clone()) for n, t in weights)
            assert_same(model, reference, f"{loader.__name__}, sync {seed}")
        assert wire.unpacker.plan.refused.get(name, "") == why, loader.__name__


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
        plan = copy_plan.make_plan(SGLangModel(model, dist.get_rank()), sources)
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
    assert tensors == len(weights) - 2 and set(wire.unpacker.plan.refused) == set(swapped)


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
    honest = wire.agreement.gather

    def uneven(what: str, value: Any) -> Any:
        if what != "exchanging what the engine reads":
            return honest(what, value)
        nbytes, lines = next((nbytes, lines) for nbytes, lines, numbers in value if number in numbers)
        return [*honest(what, value), ((nbytes, lines[:1], (number,)),)]

    with mock.patch.object(wire.agreement, "gather", uneven):
        wire.sync(models.weights_of(kind, 1))
    assert wire.check.whole(wire.plan) == (number,)
    read = wire.unpacker.traffic(frozenset((0,)), beside=True)
    for seed in (2, 3):
        assert wire.sync(models.weights_of(kind, seed))[0] > 0
    assert wire.unpacker.traffic(frozenset((0,)), beside=True) > read, "reads all of it"
    assert int(wire.check.times_read[number]) == 2 and wire.check.whole(wire.plan) == (number,)


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
            what_a_replay_would_get_wrong_is_refused,
            a_model_that_keeps_tensors_is_not_planned,
            a_wrong_plan_is_found,
            changed_bytes_are_found,
            unevenly_read_tensors_are_hashed_whole,
        ):
            story("qwen2", config)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_every_model(world: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(world, str(tmp_path), port), nprocs=world)
