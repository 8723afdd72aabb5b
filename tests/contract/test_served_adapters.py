# SPDX-License-Identifier: Apache-2.0
"""Checks adapters that SGLang serves itself: its layers read every factor, or the sync names what is lost."""

import itertools
import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from worlds import on_ranks

from contract import sglang_models
from contract.families import FAMILIES, Family
from contract.test_families import model_of, publish
from contract.wire import Wire
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, hand_down, new_token, pack_request

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_processes")]

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NO_TOWER = {"exclude_modules": ".*visual.*"}
Case = tuple[str, dict[str, Any], list[str]]  # family, PEFT's settings, what SGLang is launched for
# By what comes of it: with one rank an engine, and with two
ONE: dict[str, Case] = {
    "Qwen2: served": ("Qwen2", {}, ["all"]),
    "an odd rank: served": ("Qwen2", {"r": 3}, ["all"]),
    "experts without an adapter: served": ("Qwen3-MoE", {"target_modules": LAYERS[:4]}, ["all"]),
    "some layers: served": ("Qwen2", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, LAYERS),
    "one in the checkpoint, too: served": ("Phi-3", {}, ["all"]),
    "the head: served": ("Llama", {"target_modules": [*LAYERS, "lm_head", "embed_tokens"]}, ["all"]),
    "no tower, which PEFT's list still has: served": ("Qwen2.5-VL", NO_TOWER, ["all"]),
    "Qwen3-VL: served": ("Qwen3-VL", NO_TOWER, ["all"]),
    "Qwen2.5-VL: factors of model.visual.blocks.0.attn.qkv (and 11 modules more, of": ("Qwen2.5-VL", {}, ["all"]),
    "Qwen3-VL, all: factors of model.visual.blocks.0.attn.qkv": ("Qwen3-VL", {}, ["all"]),
    "Gemma 3: factors of model.": ("Gemma 3, multimodal", {}, ["all"]),
    "Gemma 3, text: language_model.model.layers.0.self_attn.qkv_proj the same ones": (
        "Gemma 3, multimodal",
        {"exclude_modules": ".*vision.*"},
        LAYERS,
    ),
    "Phi: factors of model.layers.0.self_attn.dense (and 5 modules more, of dense, fc1, fc2)": ("Phi-1.5", {}, ["all"]),
    "StarCoder2: factors of model.layers.0.mlp.c_fc (and 3 modules more, of c_fc, c_proj)": ("StarCoder2", {}, ["all"]),
    "a model of transformers' own: SGLang has no place for these": ("SmolLM3", {}, ["all"]),
    "k and v alone: in one, and needs factors of q_proj, too": ("Qwen2", {"target_modules": LAYERS[1:3]}, LAYERS[1:3]),
    "left out at launch: SGLang has no place for these": ("Qwen2", {"target_modules": LAYERS}, ["o_proj"]),
}
TWO: dict[str, Case] = {
    "served": ("Qwen2", {}, ["all"]),
    "Phi-3: served": ("Phi-3", {}, ["all"]),
    "Gemma 2: served": ("Gemma 2", {"target_modules": LAYERS}, LAYERS),
}
NAME = "served"
RANK, ROOM = 4, 8
Factors = dict[str, torch.Tensor]


def adapter_of(family: Family, **settings: Any) -> tuple[dict[str, Any], Callable[[int], Factors]]:
    """Settings of an adapter as PEFT resolves them, and what makes its factors of a seed."""
    given = LoraConfig(task_type="CAUSAL_LM", **{"r": RANK, "target_modules": "all-linear", **settings})
    adapted = get_peft_model(model_of(family), given)
    names = get_peft_model_state_dict(adapted, save_embedding_layers=False)

    def factors(seed: int) -> Factors:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(factor.shape, generator=generator).bfloat16() for name, factor in names.items()}

    return adapted.peft_config["default"].to_dict(), factors


def manager_of(family: Family, home: Path, targets: set[str]) -> Any:
    """SGLang's LoRA manager around its own class of the model, as an engine rank launches it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.server_args import get_global_server_args

    home.mkdir(parents=True)
    publish(family, home)
    config = sglang_models.start_from(home, family.attention)
    return LoRAManager(
        sglang_models.build(config), config.hf_config, 8, LoadConfig(), torch.bfloat16, get_global_server_args(),
        lora_backend="torch_native", tp_size=dist.get_world_size(), tp_rank=dist.get_rank(), max_lora_rank=ROOM,
        target_modules=targets,
    )  # fmt: skip


def packed(settings: dict[str, Any], factors: Factors) -> tuple[dict[str, Any], Any]:
    """Returns the settings of an adapter as a server gets them, and the summary of its factors."""
    (served, _, sent), _ = rollout_of("sglang").pack_adapter(settings, factors)
    return served, sent


def load(manager: Any, settings: dict[str, Any], factors: Factors) -> None:
    """Replaces the adapter, as a server does."""
    from sglang.srt.lora.lora_registry import LoRARef

    for held in list(manager.lora_refs.values()):
        assert manager.unload_lora_adapter(held).success
    named = LoRARef(lora_name=NAME, lora_path="__tensor__", pinned=False)
    done = manager.load_lora_adapter_from_tensors(named, factors, packed(settings, factors)[0])
    assert done.success, f"SGLang refused the adapter: {done.error_message}"


def refusal(manager: Any, adapter: str, factors: Factors) -> str:
    """Has all ranks look at the adapter, for which a scheduler calls our loader by its name; returns their answer."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.utils import dynamic_import

    class Rank(Scheduler):
        def __init__(self) -> None:
            self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))

        def look(self, folder: str) -> None:
            request = pack_request((folder, adapter, packed({}, factors)[1]))
            dynamic_import(ADAPTER_CHECK)(manager.base_model, pickle.loads(request))

    with tempfile.TemporaryDirectory() as folder:
        Rank().look(folder)
        said = [json.loads(answer.read_text()) for answer in Path(folder).iterdir()] or [None]  # rank 0 answers
    dist.broadcast_object_list(said)
    assert said[0] is not None
    return said[0]


def outcome(family: str, settings: dict[str, Any], targets: set[str], home: Path) -> str:
    """``served``, after three adapters and what must not pass for one; or why the first one is refused."""
    resolved, factors = adapter_of(FAMILIES[family], **settings)
    manager = manager_of(FAMILIES[family], home, targets)
    # Also the parameters of layers that an adapter wraps
    wire = Wire(manager.base_model)
    wire.sync([pair for file in home.glob("*.safetensors") for pair in load_file(file).items()])
    assert all(kept.buffer for kept, *_ in wire.comparison.unwritten), wire.comparison.unwritten
    if why := refusal(manager, "", factors(1)):
        return why
    for seed in (1, 2, 3):
        load(manager, resolved, factors(seed))
        assert refusal(manager, NAME, factors(seed)) == ""
        assert "SGLang has taken other ones than it was sent" in refusal(manager, NAME, factors(seed + 1))
        in_the_way_of_rubbish(manager, factors(seed))
    return "served"


def in_the_way_of_rubbish(manager: Any, factors: Factors) -> None:
    """Every factor changed where SGLang's layers read it, one at a time and on one rank, is found."""
    pool, turns = manager.memory_pool, itertools.cycle(range(dist.get_world_size()))
    slot = pool.get_buffer_id(next(iter(manager.lora_refs)))
    for name, layers in (*pool.A_buffer.items(), *pool.B_buffer.items()):
        for held in (layer[slot].view(-1) for layer in layers):
            for where in held.nonzero()[:1]:
                sign = -1 if next(turns) == dist.get_rank() else 1
                held[where] *= sign
                assert "SGLang computes with other ones" in refusal(manager, NAME, factors), name
                held[where] *= sign
    assert refusal(manager, NAME, factors) == ""


@pytest.mark.parametrize(("world", "cases"), [(1, ONE), (2, TWO)], ids=["one rank", "two ranks"])
@on_ranks("world", timeout=500)
def test_every_factor_is_read_or_named(world: int, cases: dict[str, Case], tmp_path: Path) -> None:
    hand_down(new_token())
    for number, (expected, (family, settings, targets)) in enumerate(cases.items()):
        found = outcome(family, settings, set(targets), tmp_path / f"{number}-{dist.get_rank()}")
        assert expected.partition(":")[2].strip() in found, f"{family}: {found}"
        assert found == "served" or "Set actor_rollout_ref.model.lora.merge=True" in found, found
        dist.barrier()
