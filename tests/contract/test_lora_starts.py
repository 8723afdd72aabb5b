# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT computes from the weights start alike on any number of ranks, in verl's own engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from worlds import run_world

import tiny_models
from bare_engine import trainer

Built = list[dict[str, torch.Tensor]]
PEFT: list[dict[str, Any]] = [
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "mica"},
    {"init_lora_weights": "pissa", "use_dora": True},
    {"init_lora_weights": "olora", "modules_to_save": ["lm_head"]},
]
TARGETS = ["q_proj", "down_proj"]


def built(checkpoint: str, adapter: str, strategy: str) -> tuple[Built, list[list[tuple[str, bool]]]]:
    """The whole state of each model, and what of it is trained."""
    settings = {"use_orig_params": True} if strategy == "fsdp" else {}
    models = [{"lora_alpha": 8, "target_modules": TARGETS, "lora": {"peft": peft, "merge": True}} for peft in PEFT]
    states, trained = [], []
    for model in (*models, {"lora_adapter_path": adapter}):
        engine: Any = trainer.build(checkpoint, strategy, model={"lora_rank": 4, **model}, **settings)
        states.append(trainer.full_state(engine))
        trained.append([(name, each.requires_grad) for name, each in engine.module.named_parameters()])
    return states, trained


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_two_ranks_start_as_one(strategy: str, tmp_path: Path) -> None:
    """Of a model that is not tied, verl loads the weights on rank 0 alone."""
    checkpoint, adapter = str(tiny_models.write("qwen2", tmp_path / "model")), str(tmp_path / "adapter")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights="pissa", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(adapter)
    ((expected, trained),) = run_world(1, built, checkpoint, adapter, strategy)
    for got, trained_too in run_world(2, built, checkpoint, adapter, strategy):
        assert trained_too == trained
        for settings, alone, together in zip([*PEFT, adapter], expected, got, strict=True):
            assert alone.keys() == together.keys(), settings
            assert [name for name in alone if not torch.equal(alone[name], together[name])] == [], settings
