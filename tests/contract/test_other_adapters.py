# SPDX-License-Identifier: Apache-2.0
"""Everything of PEFT that is no LoRA layer is refused by module and type, before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftMixedModel, get_peft_model, inject_adapter_in_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from worlds import run_world

import tiny_models
from bare_engine import trainer
from contract.fsdp_models import build
from contract.sources import StandIn, endpoint_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.lora.peft import Adapters
from verl_sync_plugin.sharding_manager import get_sharding_manager

TARGETS = {"target_modules": ["q_proj", "down_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "IA3": {**TARGETS, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": TARGETS,
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1]},
    "VERA": {"target_modules": ["q_proj"]},
}


def other(kind: str) -> Any:
    """A model with an adapter of that type."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    return get_peft_model(build("llama"), config(**SETTINGS[kind], task_type="CAUSAL_LM"))


def refusal(model: torch.nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        Adapters(model)
    assert "custom.sync.enabled=False" in str(caught.value), "names no remedy"
    return str(caught.value)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_of_another_type_is_refused_by_name(kind: str) -> None:
    assert f"peft_type={kind}" in refusal(other(kind))


@pytest.mark.parametrize("kind", SETTINGS)
def test_so_is_its_first_module_where_no_config_tells(kind: str) -> None:
    """Layers that were put in by hand, or a config that was taken away."""
    model = other(kind)
    for module in model.modules():
        for attribute in ("peft_config", "_peft_config"):
            vars(module).pop(attribute, None)
    text = refusal(model)
    named = [name for name, _ in model.named_modules() if f"{name!r}" in text]
    assert named, text
    of_peft = type(model.get_submodule(named[0]))
    assert of_peft.__module__.startswith("peft.") and f"is a {of_peft.__name__}" in text


def test_lora_beside_another_type_is_refused() -> None:
    mixed = PeftMixedModel(build("qwen2"), LoraConfig(target_modules=["q_proj"]))
    mixed.add_adapter("other", LoHaConfig(target_modules=["v_proj"]))
    mixed.set_adapter(["default", "other"])
    assert "LOHA" in refusal(mixed)


def test_lora_over_layers_of_another_type_is_refused() -> None:
    base = inject_adapter_in_model(IA3Config(target_modules=["v_proj"], feedforward_modules=[]), build("qwen2"))
    del base.peft_config
    text = refusal(get_peft_model(base, LoraConfig(target_modules=["q_proj"])))
    assert "layers.0.self_attn.v_proj' is a Linear of PEFT" in text and "ia3" in text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("qwen2", tmp_path_factory.mktemp("others") / "model")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("ia3")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(str(folder))
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "IA3"
    return folder


def opened(checkpoint: str, model: dict[str, Any], strategy: str) -> str:
    """What stops the first step of the first sync of verl's own engine."""
    settings = {"use_orig_params": True} if strategy == "fsdp" else {}
    engine = trainer.build(checkpoint, strategy, model={"lora_rank": 4, **model}, **settings)
    manager = get_sharding_manager(strategy, "sglang")
    with pytest.raises(ValueError) as caught:
        manager(engine, endpoint_of(StandIn()), SyncConfig(), 1 << 20, torch.device("cpu")).open_source()
    return str(caught.value)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_adapter_that_verl_loads_is_refused(strategy: str, merge: bool, checkpoint: Path, adapter: Path) -> None:
    loaded = {"lora_adapter_path": str(adapter), "lora": {"merge": merge}}
    (text,) = run_world(1, opened, str(checkpoint), loaded, strategy)
    assert "peft_type=IA3" in text
