# SPDX-License-Identifier: Apache-2.0
"""Loads on SGLang's own model classes: no copy is wrong, no flipped bit is unseen, and nothing sent is left out."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract import sglang_models as models
from contract.sglang_models import weights_of
from contract.sources import raised_alike
from contract.wire import Wire
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sync import manager
from verl_sync_plugin.verify import DERIVED, Comparison

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_processes")]
HELD = "do not hold what was sent of"
NORM, OTHER_DTYPE = "model.norm.weight", "is copied through a view of another dtype"


def every_flipped_bit_is_found(kind: str, config: Any) -> None:
    """One bit anywhere in any parameter, on one rank: padding of the vocabulary, fused parts, replicated ones."""
    wire = Wire(models.build(config), verify="always")
    wire.sync(weights_of(kind, 1))
    # DeepSeek's attention has weights of its own, derived from others
    assert wire.comparison.left_out == ({DERIVED: "is computed"} if kind == "deepseek-v3" else {})
    assert len(wire.comparison.compared) == len(wire.plan.bases) and not wire.comparison.unwritten
    generator, found = random.Random(kind), 0
    for parameter in wire.model.parameters():
        flat = parameter.data.view(-1).view(torch.uint8)
        for at in {flat.numel() - 1, generator.randrange(flat.numel())}:
            bit, rank = 1 << generator.randrange(8), generator.randrange(dist.get_world_size())
            flipped = bit if dist.get_rank() == rank else 0
            flat[at] ^= flipped
            text = raised_alike(SyncError, wire.compare)
            assert HELD in text or "hold what no load puts there" in text, text
            flat[at] ^= flipped
            found += 1
    assert found > 30
    wire.compare()


def a_router_bias_kept_in_fp32_is_compared(config: Any) -> None:
    """Sent as bfloat16 and kept wider: the lower half of an element, which no bfloat16 has, is looked at, too."""
    narrow = [(n, t.to(torch.bfloat16)) for n, t in weights_of("deepseek-v3", 1)]
    wire = Wire(models.build(config))
    wire.sync(narrow)
    parameter = dict(wire.model.named_parameters())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert parameter.dtype == torch.float32 and set(wire.comparison.left_out) == {DERIVED}
    for at in (1, 3):  # little endian: lower half, upper half
        with pytest.raises((SyncError, ValueError)):
            parameter.data.view(torch.uint8)[at] ^= 1
            wire.compare()
        parameter.data.view(torch.uint8)[at] ^= 1
    wire.compare()


@on_ranks(2, timeout=500)
@torch.no_grad()
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    for kind in ("qwen2", "qwen2-tied", "qwen3-moe", "deepseek-v3"):
        every_flipped_bit_is_found(kind, models.start(tmp_path, kind))
    a_router_bias_kept_in_fp32_is_compared(models.start(tmp_path, "deepseek-v3"))


@on_ranks(2, timeout=60)
@torch.no_grad()
def test_a_sync_that_fails_while_maps_are_exchanged_can_be_run_again(tmp_path: Path) -> None:
    """And a rank that fails outside of all that is agreed on, say where no thread can be started, is heard at once."""
    wire, alone = Wire(models.build(models.start(tmp_path, "qwen2"))), dist.get_rank() == 0
    late = None if alone else MemoryError()
    with (
        mock.patch.object(Comparison, "_find_factors", side_effect=late),
        pytest.raises(SyncError, match="rank 1: MemoryErr"),
    ):
        wire.sync(weights_of("qwen2", 0))
    for seed in (1, 2):
        assert wire.sync(weights_of("qwen2", seed)).verified_tensors > 0
    failing = mock.patch.object(manager, "progress", side_effect=RuntimeError("no thread")) if alone else nullcontext()
    with failing, pytest.raises(RuntimeError, match="no thread" if alone else "a rank died or did not reach"):
        wire.sync(weights_of("qwen2", 0))


# SGLang's own loader of Gemma's norms, then those of 0.5.13 and 0.5.23
NORM_LOADERS: tuple[Callable[[Any, torch.Tensor, torch.Tensor], object] | None, ...] = (
    None,
    lambda norm, p, t: (p.data.copy_(t), torch.add(p.data, 1.0, out=norm.gemma_weight)),
    lambda norm, p, t: (p.data.copy_(t), norm.gemma_weight.copy_(norm.weight.data).add_(1.0)),
)


WANTED: dict[str, Callable[[Any], torch.Tensor]] = {
    "_weight_fp32": lambda router: router.weight.float(),
    "_fused_scale": lambda router: router.scale * router.hidden_size**-0.5,
    "gemma_weight": lambda norm: norm.weight + 1.0,
}


@on_ranks(2, timeout=500)
@torch.no_grad()
def test_copies_of_weights_are_refreshed_where_graphs_read_them(tmp_path: Path) -> None:
    """SGLang's GLM and Gemma 4 make that of a router in its first forward, its Gemma 2 that of a norm in every load."""
    norms = [("gemma2", "gemma_weight", loader) for loader in NORM_LOADERS]
    routers = ("glm4-moe", "_weight_fp32", None), ("gemma4-moe", "_fused_scale", None)
    for kind, copy_of, loader in [*routers, *norms]:
        model = models.build(models.start(tmp_path, kind))
        layers = [each for each in model.modules() if hasattr(each, copy_of)]
        for layer in layers if loader else ():
            layer.weight.weight_loader = partial(loader, layer)
        wire, first = Wire(model), [getattr(each, copy_of) for each in layers]
        for seed in (1, 2, 3):
            wire.sync(weights_of(kind, seed))
            for layer in layers if kind != "gemma2" else ():
                layer(torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16))
            lie = [getattr(each, copy_of) for each in layers]
            wanted = [WANTED[copy_of](each) for each in layers]
            assert layers and all(map(torch.equal, lie, wanted)), (kind, seed)
            assert all(a is b for a, b in zip(first, lie, strict=True) if a is not None), (kind, seed)
            first = lie
        assert kind != "gemma2" or not (wire.left or wire.load.obstacle), "read in place from the second sync on"


# Loaders that a model may give a parameter of its own, each of which does more, or another thing, than to copy; and why
# its tensor is left to the model, empty if it is copied
LOADERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "plus one": (lambda p, t: p.data.copy_(t + 1), "goes through aten.add.Tensor"),
    "last row cleared": (lambda p, t: (p.data.copy_(t), p.data[-1].zero_()), "is overwritten by a constant in part"),
    "as words": (lambda p, t: p.data.view(torch.int16).copy_(t.view(torch.int16)), OTHER_DTYPE),
    "negated": (lambda p, t: p.data.copy_(torch._neg_view(t)), OTHER_DTYPE),
    # as SGLang's Gemma adds one to its norms
    "changed where it lies": (lambda p, t: p.data.copy_(t.mul_(2)), "goes through aten.mul_.Tensor"),
    "cleared first": (lambda p, t: (p.data.zero_(), p.data.copy_(t)), ""),
}


def what_a_copy_would_get_wrong_is_left_to_the_model(config: Any) -> None:
    """By what the load does, not by values: those of the first sync are such that a wrong copy gives them, too."""
    for called, (loader, why) in LOADERS.items():
        model, reference = models.build(config), models.build(config)
        for each in (model, reference):
            each.model.norm.weight.weight_loader = loader
        wire = Wire(model)
        for seed in (1, 2, 3):
            weights = [(n, t * 0 if n == NORM and seed == 1 else t) for n, t in weights_of("qwen2", seed)]
            assert wire.exact(reference, weights).replayed_tensors == len(weights) * (not why), called
        assert wire.left == ({NORM: why} if why else {}), called


def moved_parameters_start_over(config: Any) -> None:
    """None of it makes an operation, yet the sync after it finds out again what the model does."""
    model, reference = models.build(config), models.build(config)
    wire, mlp = Wire(model), model.model.layers[1].mlp
    wire.exact(reference, weights_of("qwen2", 0))
    known = wire.load.map

    def memory() -> None:
        mlp.gate_up_proj.weight.data = mlp.gate_up_proj.weight.data.clone()

    def load() -> None:
        model.model.norm.weight.weight_loader = lambda p, t: p.data.copy_(t + 0)
        memory()

    def parameter(of: Any = mlp.gate_up_proj) -> None:
        before = of.weight
        of.weight = torch.nn.Parameter(before.data.clone(), requires_grad=False)
        of.weight.__dict__.update(before.__dict__)

    def module() -> None:
        mlp.down_proj = copy.copy(mlp.down_proj)
        mlp.down_proj.__dict__["_parameters"] = dict(mlp.down_proj._parameters)
        parameter(mlp.down_proj)

    for number, move in enumerate((memory, parameter, module, load)):
        move()
        for seed in (2 * number + 1, 2 * number + 2):
            before = wire.load.map
            report = wire.exact(reference, weights_of("qwen2", seed))
            assert (wire.load.map == known) == (move is not load), move
            assert (wire.load.map is before) == (seed % 2 == 0), move
            if move is load and seed % 2 == 0:
                assert report.verified_tensors > 0, "another map is verified, however many syncs there were"


def a_load_that_keeps_tensors_or_needs_values_is_an_error(config: Any) -> None:
    """Neither as a parameter's data nor as an attribute: bytes of a slot are only lent."""
    keepers = (
        ("cannot be recorded", lambda parameter, loaded: setattr(parameter, "data", loaded)),
        ("cannot be recorded", lambda parameter, loaded: parameter.data.copy_(torch.from_numpy(loaded.numpy()))),
        (f"keeps {NORM}", lambda parameter, loaded: setattr(norm, "seen", loaded)),
    )
    for why, keep in keepers:
        model = models.build(config)
        norm = model.model.norm
        norm.weight.weight_loader = keep
        with pytest.raises(SyncError, match=f"SGLang's Qwen2ForCausalLM: its load {why}.* to run stock verl"):
            Wire(model).sync(weights_of("qwen2", 1))


def a_wrong_recording_is_an_error(config: Any) -> None:
    """Where marks lie is compared with where they were said to go, before anything is copied."""
    model = models.build(config)
    honest, swapped = model.load_weights, {GATE: UP, UP: GATE}
    model.load_weights = lambda weights: honest(
        (swapped.get(name, name) if loaded.is_meta else name, loaded) for name, loaded in weights
    )
    with pytest.raises(SyncError, match=f"Qwen2ForCausalLM puts {GATE} elsewhere with real tensors than without"):
        Wire(model).sync(weights_of("qwen2", 1))


GATE, UP = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
UNKNOWN = r"leaves out 1 of the 28 .*experts\.0\.w9\.weight"


def with_one_more(seed: int) -> models.Weights:
    """A checkpoint with a tensor of a name that no model of SGLang's knows."""
    return [*weights_of("qwen2", seed), ("model.layers.0.mlp.experts.0.w9.weight", torch.full((4, 4), 1.0))]


def unknown_names_are_an_error(config: Any) -> None:
    """Before anything is sent, and in every sync until they are gone."""
    model = models.build(config)
    wire = Wire(model)
    for _ in range(2):
        with pytest.raises(SyncError, match=rf"{UNKNOWN} \(64 of 64 bytes\)"):
            wire.sync(with_one_more(1))
    wire = Wire(model)
    assert all(wire.sync(weights_of("qwen2", seed)).replayed_tensors == 27 for seed in (1, 2))


def what_is_written_only_in_part_is_an_error(config: Any) -> None:
    """Though the engine keeps a host copy; here no rank is sent a quarter of two fused parameters."""
    some = [each for each in weights_of(MOE, 1) if "layers.1.mlp.experts.2." not in each[0]]
    wire = Wire(models.build(config))
    for _ in range(2):
        text = raised_alike(SyncError, wire.sync, some)
        assert "unwritten, or writes them only in part" in text and "model.layers.1.mlp.experts.w2_weight" in text


def half_of_a_tensor_is_an_error(config: Any) -> None:
    """The ranks of an engine together must use every byte: here none takes the second half."""
    model = models.build(config)
    model.model.norm.weight.weight_loader = lambda parameter, loaded: parameter.data[:32].copy_(loaded[:32])
    with pytest.raises(SyncError, match=r"model\.norm\.weight \(64 of 128 bytes\)"):
        Wire(model).sync(weights_of("qwen2", 1))


def a_rank_without_room_for_marks_fails_all(config: Any) -> None:
    weights = weights_of("qwen2", 1)

    def crowded(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        if dist.get_rank() == 1 and not (loaded.is_meta or torch.equal(loaded, dict(weights)[NORM])):
            raise torch.OutOfMemoryError("injected")
        parameter.data.copy_(loaded)

    model = models.build(config)
    model.model.norm.weight.weight_loader = crowded
    said = "no device memory for a load of marks, which proves its map: injected. Lower rollout.gpu_memory"
    assert said in raised_alike(SyncError, Wire(model).sync, weights)


def an_untied_head_that_takes_the_embeddings_place_is_an_error(config: Any) -> None:
    """As some of SGLang's models write it there; others leave it out, see ``test_families``."""
    model, tied = models.build(config), weights_of("qwen2-tied", 1)
    untied = [*tied[:-1], (tied[-1][0], tied[-1][1] + 1)]
    honest = model.load_weights
    model.load_weights = lambda weights: honest(
        ("model.embed_tokens.weight" if name == "lm_head.weight" else name, loaded) for name, loaded in weights
    )
    with pytest.raises(SyncError, match=r"leaves out 1 .*model\.embed_tokens\.weight"):
        Wire(model).sync(untied)
    Wire(model).sync(tied)


@on_ranks(2, timeout=500)
@torch.no_grad()
def test_what_loads_do_otherwise_is_found(tmp_path: Path) -> None:
    config = models.start(tmp_path, "qwen2")
    for story in (
        what_a_copy_would_get_wrong_is_left_to_the_model,
        moved_parameters_start_over,
        a_load_that_keeps_tensors_or_needs_values_is_an_error,
        a_wrong_recording_is_an_error,
        unknown_names_are_an_error,
        half_of_a_tensor_is_an_error,
        a_rank_without_room_for_marks_fails_all,
    ):
        story(config)
    an_untied_head_that_takes_the_embeddings_place_is_an_error(models.start(tmp_path, "qwen2-tied"))


MOE = "qwen3-moe"
# The expert of each place, half of them on either rank, where one holds an expert twice; before and after a rebalancing
PLACED = ([0, 0, 1, 2, 3, 4, 5, 6, 7, 1], [2, 3, 3, 4, 5, 0, 6, 6, 7, 1])


def place(experts: list[int], config: Any) -> None:
    """Puts SGLang's experts where its load balancing may put them."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.server_args import get_global_server_args

    layers = torch.tensor(experts).repeat(config.hf_config.num_hidden_layers, 1)
    rank, args = dist.get_rank(), get_global_server_args()
    metadata = expert_location.ExpertLocationMetadata.init_by_mapping(args, config, layers, rank)
    known = expert_location.get_global_expert_location_metadata()
    if known is None:
        expert_location.set_global_expert_location_metadata(metadata)
    else:
        known.update(metadata, update_layer_ids=list(range(len(layers))))


def holds(model: Any, experts: list[int], weights: models.Weights) -> None:
    """Every place holds its expert, whoever requests are sent to."""
    sent = dict(weights)
    for layer, block in enumerate(model.model.layers):
        for slot, expert in enumerate(experts[5 * dist.get_rank() :][:5]):
            of = f"model.layers.{layer}.mlp.experts.{expert}"
            fused = torch.cat([sent[f"{of}.gate_proj.weight"], sent[f"{of}.up_proj.weight"]])
            assert torch.equal(block.mlp.experts.w13_weight[slot], fused), (layer, slot)
            assert torch.equal(block.mlp.experts.w2_weight[slot], sent[f"{of}.down_proj.weight"]), (layer, slot)


def every_replica_gets_its_weights(config: Any) -> None:
    """Also two on one rank, of which SGLang's own load skips one; and after the load was balanced again."""
    place(PLACED[0], config)
    model = models.build(config)
    wire = Wire(model)
    for seed in range(1, 7):
        experts, weights = PLACED[seed > 3], weights_of(MOE, seed)
        place(experts, config)
        assert wire.sync(weights).replayed_tensors == len(weights)
        assert not wire.comparison.unwritten, wire.comparison.unwritten
        holds(model, experts, weights)


@on_ranks(2, timeout=500)
@torch.no_grad()
def test_experts(tmp_path: Path) -> None:
    """Two ranks of one engine, which share out the experts."""
    from sglang.srt.eplb import expert_location

    config = models.start(tmp_path, MOE, ep_size=2, ep_num_redundant_experts=2)
    every_replica_gets_its_weights(config)
    what_is_written_only_in_part_is_an_error(config)
    expert_location._global_expert_location_metadata = None
