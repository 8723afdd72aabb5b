# SPDX-License-Identifier: Apache-2.0
"""Adapters that SGLang serves itself: its layers read every factor that was sent, or the sync names what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from contract.served_adapters import run_rank
from ports import free_port

pytestmark = pytest.mark.slow

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
    "left out at launch: SGLang has no place for these": ("Qwen2", {"target_modules": LAYERS}, ["o_proj"]),
}
TWO: dict[str, Case] = {
    "served": ("Qwen2", {}, ["all"]),
    "Phi-3: served": ("Phi-3", {}, ["all"]),
    "Gemma 2: served": ("Gemma 2", {"target_modules": [*LAYERS, "lm_head"][:7]}, LAYERS),
}


@pytest.mark.parametrize("cases", [ONE, TWO], ids=["one rank", "two ranks"])
def test_every_factor_is_read_or_named(cases: dict[str, Case], tmp_path: Path) -> None:
    port = free_port()
    world = 1 if cases is ONE else 2
    mp.spawn(run_rank, args=(world, str(tmp_path), port, cases), nprocs=world)
