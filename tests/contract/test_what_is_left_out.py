# SPDX-License-Identifier: Apache-2.0
"""Nothing that the trainer sends is left out, on SGLang's own model classes: with a recording of the load, where it
cannot be recorded, and where what is not replayed is loaded alone.

Every story runs on two tensor-parallel ranks of one engine, each a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from contract import sglang_models as models
from contract.wire import Wire
from ports import free_port
from verl_sync_plugin.errors import SyncError

pytestmark = pytest.mark.slow
GATE, UP = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))


def with_one_more(seed: int) -> models.Weights:
    """A checkpoint with a tensor of a name that no model of SGLang's knows."""
    return [*models.weights_of("qwen2", seed), ("model.layers.0.mlp.experts.0.w9.weight", torch.full((4, 4), 1.0))]


def unknown_names_are_an_error(config: Any) -> None:
    """Before anything is sent, and in every sync until they are gone."""
    model = models.build(config)
    wire = Wire(model, with_one_more(0), 1, 1 << 16)
    for _ in range(2):
        with pytest.raises(SyncError, match=r"leaves out 1 of the 28 .*experts\.0\.w9\.weight \(64 of 64 bytes\)"):
            wire.sync(with_one_more(1))
    wire = Wire(model, models.weights_of("qwen2", 0), 1, 1 << 16)
    assert all(wire.sync(models.weights_of("qwen2", seed))[0] == 27 for seed in (1, 2))


def an_untied_head_is_an_error_where_the_engine_ties(config: Any) -> None:
    """A tied one travels as the embedding; one of its own would be left out by an engine that ties."""
    model = models.build(config)
    tied = models.weights_of("qwen2-tied", 1)
    untied = [*tied[:-1], ("lm_head.weight", tied[-1][1] + 1)]
    with pytest.raises(SyncError, match=r"leaves out 1 .*lm_head\.weight"):
        Wire(model, untied, 2, 1 << 16).sync(untied)
    wire = Wire(model, tied, 2, 1 << 16)
    assert [wire.sync(models.weights_of("qwen2-tied", seed))[0] > 0 for seed in (1, 2, 3)] == [True] * 3


def a_head_of_its_own_holds_the_tied_weight(config: Any) -> None:
    """Under which names the trainer sends it does not matter; and a head that the trainer unties stays its own."""
    model, heads = models.build(config), {}
    for sent in ("embedding", "both", "untied"):
        weights = models.weights_of("qwen3-moe-tied", 1)
        weights = weights[:-1] if sent == "embedding" else weights
        if sent == "untied":
            weights[-1] = (weights[-1][0], weights[-1][1] + 1)
        wire = Wire(model, weights, 2, 1 << 16)
        wire.sync(weights)
        assert wire.sync(weights)[0] == len(weights) and not wire.comparison.unwritten, wire.left
        heads[sent] = model.lm_head.weight.clone()
        assert torch.equal(heads[sent], model.model.embed_tokens.weight) == (sent != "untied")
    assert torch.equal(heads["embedding"], heads["both"])


def what_lands_where_another_tensor_is_does_not_count(config: Any) -> None:
    """Some of SGLang's models write a tied head into the embedding; an untied one would take the embedding's place."""
    model = models.build(config)
    honest = model.load_weights

    def load(weights: Any) -> None:
        honest(("model.embed_tokens.weight" if name == "lm_head.weight" else name, loaded) for name, loaded in weights)

    model.load_weights = load
    tied = models.weights_of("qwen2-tied", 1)
    untied = [*tied[:-1], ("lm_head.weight", tied[-1][1] + 1)]
    with pytest.raises(SyncError, match=r"leaves out 1 .*model\.embed_tokens\.weight"):
        Wire(model, untied, 2, 1 << 16).sync(untied)
    Wire(model, tied, 2, 1 << 16).sync(tied)


def half_of_a_tensor_is_an_error(config: Any) -> None:
    """The ranks of an engine together must use every byte: here none takes the second half."""
    model = models.build(config)
    norm = model.model.norm.weight
    norm.weight_loader = lambda parameter, loaded: parameter.data[:32].copy_(loaded[:32])
    with pytest.raises(SyncError, match=r"model\.norm\.weight \(64 of 128 bytes\)"):
        Wire(model, models.weights_of("qwen2", 0), 2, 1 << 16).sync(models.weights_of("qwen2", 1))


def _looks_at_values(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    assert loaded.device.type != "meta", "this loader needs values"
    parameter.data.copy_(loaded)


def what_cannot_be_recorded_is_watched(config: Any) -> None:
    """A load of marks tells what it uses."""
    model, reference = models.build(config), models.build(config)
    model.model.norm.weight.weight_loader = _looks_at_values
    wire = Wire(model, with_one_more(0), 2, 20_000)
    with pytest.raises(SyncError, match=r"leaves out 1 of the 28 .*experts\.0\.w9\.weight"):
        wire.sync(with_one_more(1))
    wire = Wire(model, models.weights_of("qwen2", 0), 2, 20_000)
    for seed in (1, 2, 3):
        assert wire.sync(models.weights_of("qwen2", seed)) == (0, 0)
        reference.load_weights(iter(models.weights_of("qwen2", seed)))
        ours, theirs = models.held(model), models.held(reference)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def waits_for_its_partner(model: Any) -> None:
    """Gives a model a loader that writes a fused pair only when both halves came in one call, as DeepSeek's does."""
    honest = model.load_weights

    def load(weights: Any) -> None:
        given = dict(weights)
        halves = [given.pop(name) for name in (GATE, UP) if name in given]
        if len(halves) == 2:
            honest(iter([(GATE, halves[0] + 0), (UP, halves[1])]))  # the sum keeps it from being replayed
        honest(iter(given.items()))

    model.load_weights = load


def leftovers_that_are_not_loaded_alone_are_an_error(config: Any) -> None:
    """A sync would give the model only what is not copied."""
    model = models.build(config)
    waits_for_its_partner(model)
    wire = Wire(model, models.weights_of("qwen2", 0), 1, 1 << 30)
    reference = models.build(config)
    for seed in (1, 2):
        wire.sync(models.weights_of("qwen2", seed))
        reference.load_weights(iter(models.weights_of("qwen2", seed)))
        ours, theirs = models.held(model), models.held(reference)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert set(wire.left) >= {GATE, UP}


def run_rank(rank: int, world: int, folder: str, port: int) -> None:
    """One tensor-parallel rank; entry of a spawned process."""
    torch.set_num_threads(1)
    with torch.no_grad():
        config = models.start(Path(folder), "qwen2", rank, world, port)
        unknown_names_are_an_error(config)
        half_of_a_tensor_is_an_error(config)
        what_cannot_be_recorded_is_watched(config)
        leftovers_that_are_not_loaded_alone_are_an_error(config)
        a_head_of_its_own_holds_the_tied_weight(models.start(Path(folder), "qwen3-moe-tied", rank, world, port))
        tied = models.start(Path(folder), "qwen2-tied", rank, world, port)
        an_untied_head_is_an_error_where_the_engine_ties(tied)
        what_lands_where_another_tensor_is_does_not_count(tied)


def test_nothing_is_left_out(tmp_path: Path) -> None:
    port = free_port()
    mp.spawn(run_rank, args=(2, str(tmp_path), port), nprocs=2)
