# SPDX-License-Identifier: Apache-2.0
"""Loads on SGLang's own model classes: copies give what the model's own ``load_weights`` gives, bit for bit.

Sender and receiver are the real ones without a channel: ``Packer`` fills the buckets of every trainer rank,
``ModelLoad`` loads them. Each tensor-parallel rank is a process; all models take turns in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp

from contract import odd_loaders
from contract import sglang_models as models
from contract.wire import Wire
from ports import free_port
from verl_sync_plugin.engine import introduce
from verl_sync_plugin.engine.recorder import Recording
from verl_sync_plugin.errors import SyncError

pytestmark = pytest.mark.slow
# trainer ranks, bucket size, sharded: whole tensors in one piece; many torn ones; a few
CUTS = ((1, 1 << 30, False, True), (3, 20_000, True, False), (2, 1 << 16, False, False), (3, 20_000, True, True))


def assert_same(model: Any, reference: Any, what: str) -> None:
    ours, theirs = models.held(model), models.held(reference)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{what}: {different[:8]}"


def copies_are_exact(kind: str, config: Any) -> None:
    """Three syncs of every cut, all of them copied whole."""
    model, reference = models.build(config), models.build(config)
    for ranks, bucket_bytes, sharded, verified in CUTS:
        wire = Wire(model, models.weights_of(kind, 0), ranks, bucket_bytes, sharded, verified=verified)
        nbytes = sum(tensor.nbytes for _, tensor in models.weights_of(kind, 0))
        for seed in (1, 2, 3):
            weights = models.weights_of(kind, seed)
            assert wire.sync(weights) == (len(weights), nbytes), (kind, ranks, seed)
            reference.load_weights(iter(weights))
            assert_same(model, reference, f"{kind}, {ranks} ranks, {bucket_bytes} bytes, sync {seed}")
        assert wire.load.map.kept > 10 and not wire.comparison.unwritten, kind


def moved_parameters_start_over(kind: str, config: Any) -> None:
    """``param.data = tensor`` makes no operation, yet the sync after it finds out again what the model does."""
    model, reference = models.build(config), models.build(config)
    wire, maps = Wire(model, models.weights_of(kind, 0), 2, 1 << 16), []
    for seed in range(1, 5):
        if seed == 3:
            moved = model.model.layers[1].mlp.gate_up_proj.weight
            moved.data = moved.data.clone()
        wire.sync(models.weights_of(kind, seed))
        maps.append(wire.load.map)
        reference.load_weights(iter(models.weights_of(kind, seed)))
        assert_same(model, reference, f"{kind}, sync {seed}")
    assert maps[0] is maps[1] is not maps[2] is maps[3] and maps[1] == maps[2]


def moved_experts_start_over(kind: str, config: Any) -> None:
    """Expert load balancing changes what a place holds, not where it is."""
    from sglang.srt.eplb import expert_location

    wire = Wire(models.build(config), models.weights_of(kind, 0), 1, 1 << 20, verified=False)
    placed = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([[1, 0]]))
    wire.sync(models.weights_of(kind, 1))
    before = wire.load.map
    with mock.patch.object(expert_location, "get_global_expert_location_metadata", lambda: placed):
        wire.sync(models.weights_of(kind, 3))
        assert wire.load.map is not before


def others_take_the_models_own_way(kind: str, config: Any) -> None:
    """Names that the model computes with, transposes or reads on the host are loaded by it; the rest is replayed."""
    model, reference = models.build(config), models.build(config)
    for each in (model, reference):
        each.model.norm.weight.weight_loader = odd_loaders.plus_one
    wire = Wire(model, models.weights_of(kind, 0), 3, 20_000)
    for seed in (1, 2, 3):
        weights = models.weights_of(kind, seed)
        assert wire.sync(weights)[0] == len(weights) - 1
        reference.load_weights(iter(weights))
        assert_same(model, reference, f"{kind}, sync {seed}")
    assert set(wire.left) == {"model.norm.weight"}


def what_a_copy_would_get_wrong_is_left_to_the_model(kind: str, config: Any) -> None:
    """By what the load does, not by values: those of the first sync are such that a wrong copy gives them, too."""
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
        assert wire.left.get(name, "") == why, loader.__name__


def a_model_that_keeps_tensors_loads_all_of_them(kind: str, config: Any) -> None:
    """Neither as a parameter's data nor as an attribute: bytes of a slot are only lent."""
    keepers = (
        ("cannot be recorded", lambda parameter, loaded: setattr(parameter, "data", loaded)),
        ("keeps model.norm.weight", lambda parameter, loaded: setattr(norm, "seen", loaded)),
    )
    for why, keep in keepers:
        model = models.build(config)
        norm = model.model.norm
        norm.weight.weight_loader = keep
        wire = Wire(model, models.weights_of(kind, 0), 1, 1 << 30)
        wire.load.begin()
        assert len(wire.left) == len(models.weights_of(kind, 0))
        assert all(why in reason for reason in wire.left.values()), wire.left


def a_wrong_recording_is_found(kind: str, config: Any) -> None:
    """Where marks lie is compared with where they were said to go, before anything is copied."""
    model, reference = models.build(config), models.build(config)
    honest = introduce.record
    swapped = {f"model.layers.0.mlp.{part}_proj.weight": other for part, other in (("gate", "up"), ("up", "gate"))}

    def wrong(*args: Any) -> Recording:
        recording = honest(*args)
        names = {name: f"model.layers.0.mlp.{other}_proj.weight" for name, other in swapped.items()}
        recording.writes = [replace(each, name=names.get(each.name, each.name)) for each in recording.writes]
        return recording

    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)
    with mock.patch.object(introduce, "record", wrong):
        for seed in (1, 2):
            weights = models.weights_of(kind, seed)
            tensors, _ = wire.sync(weights)
            reference.load_weights(iter(weights))
            assert_same(model, reference, f"{kind}, sync {seed}")
    assert tensors == len(weights) - 2
    assert wire.left == wire.comparison.left_out == dict.fromkeys(swapped, introduce.ELSEWHERE)


def changed_bytes_are_found(kind: str, config: Any) -> None:
    """One flipped bit between packing and loading."""
    model = models.build(config)
    wire = Wire(model, models.weights_of(kind, 0), 2, 1 << 16)

    def flip(memory: torch.Tensor) -> None:
        memory[4097] ^= 4

    for _ in range(2):
        with pytest.raises(SyncError, match=r"the bytes of model\.[a-z0-9_., ]+ changed on the way"):
            wire.sync(models.weights_of(kind, 1), flip)
        wire.sync(models.weights_of(kind, 2))
    assert wire.sync(models.weights_of(kind, 3))[0] > 0


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One tensor-parallel rank; entry of a spawned process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for kind in models.CONFIGS:
            copies_are_exact(kind, models.start(Path(folder), kind, rank, world, port))
        config = models.start(Path(folder), "qwen2", rank, world, port)
        for story in (
            moved_parameters_start_over,
            moved_experts_start_over,
            others_take_the_models_own_way,
            what_a_copy_would_get_wrong_is_left_to_the_model,
            a_model_that_keeps_tensors_loads_all_of_them,
            a_wrong_recording_is_found,
            changed_bytes_are_found,
        ):
            story("qwen2", config)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_every_model(world: int, tmp_path: Path) -> None:
    port = free_port()
    mp.spawn(run_rank, args=(world, str(tmp_path), port), nprocs=world)
