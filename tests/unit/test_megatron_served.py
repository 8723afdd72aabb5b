# SPDX-License-Identifier: Apache-2.0
"""An adapter of Megatron-Bridge that the engine serves: what it would leave out is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import PeftType, TaskType

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sharding_manager import get_sharding_manager


def chunk(trains_norm: bool = False, biased: bool = False) -> Any:
    """A layer whose weight is frozen, with an adapter, a norm and a router's bias."""
    model: Any = torch.nn.Module()
    model.proj = torch.nn.Module()
    model.proj.adapter = torch.nn.Linear(2, 2)
    model.norm = torch.nn.LayerNorm(2).requires_grad_(trains_norm)
    model.register_buffer("expert_bias", torch.zeros(2))
    model.config = SimpleNamespace(moe_router_enable_expert_bias=biased)
    return model


def look(monkeypatch: pytest.MonkeyPatch, **changes: bool) -> None:
    monkeypatch.setattr("verl_sync_plugin.trainers.megatron.trainer.unwrapped", lambda module: module)
    engine = Mock(module=[chunk(**changes)])
    engine.model_config.lora = {"rank": 4, "alpha": 8, "merge": False}
    backend: Any = get_sharding_manager("megatron", "sglang").backend
    backend(engine, SyncConfig(), torch.device("cpu"), "bfloat16").open_adapter(None).look()


@pytest.mark.parametrize(("change", "name"), [("trains_norm", "norm.weight"), ("biased", "expert_bias")])
def test_what_else_is_trained_is_refused(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch)
    with pytest.raises(ValueError, match=rf"lora\.merge=False: '{name}' changes in training.*lora\.merge=True"):
        look(monkeypatch, **{change: True})


def test_an_adapter_says_what_sglang_requires() -> None:
    """verl 0.9.0's config of a Megatron adapter has no ``peft_type``, and PEFT's own has enums and sets."""
    layer, pack = "base_model.model.model.layers.0.", rollout_of("sglang").pack_adapter
    factors = {f"{layer}self_attn.{name}.lora_A.weight": torch.ones(2, 2) for name in ("v_proj", "q_proj")}
    settings = {"task_type": TaskType.CAUSAL_LM, "r": 8, "target_modules": {"all-linear"}}
    for given in (settings, {**settings, "peft_type": PeftType.LORA}):
        (told, *_), _ = pack(given, factors)
        assert told == {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(ValueError, match=r"lora\.merge=False: .* factors of experts .*lora\.merge=True"):
        pack(settings, {f"{layer}mlp.experts.3.up_proj.lora_B.weight": torch.ones(2, 2)})
