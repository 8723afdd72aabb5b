# SPDX-License-Identifier: Apache-2.0
"""What would be synced or served wrong ends ``main_ppo`` in its driver, by name, before Ray starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import IA3Config
from transformers import Gemma2Config

from e2e.runs import MODEL, ROLLOUT, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LORA = (f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=True")


def said(setup: Setup, folder: Path) -> str:
    """The one line with which the plugin ends a run in the driver."""
    run = main_ppo(setup, folder)
    assert run.returncode == 1 and not run.timed_out, run.tail
    assert not run.matching("Started a local Ray instance|WorkerDict|sharding manager"), run.tail
    lines = run.matching("^verl-sync-plugin(: | cannot be loaded: )")
    assert len(lines) == 1, run.tail
    return lines[0].text


def test_wrong_key(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    key = f"{ROLLOUT}.custom.sync.timeout"
    text = said(Setup((f"{key}=5",), model=Path(tiny_model("qwen2"))), tmp_path)
    assert f"{key}=5: unknown key. Did you mean {key}_seconds?" in text


def test_another_plugin_in_our_place(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    text = said(Setup(model=Path(tiny_model("qwen2")), modules=("e2e.stranger",)), tmp_path)
    assert text.startswith("verl-sync-plugin cannot be loaded: RegistryConflictError: ")
    assert "verl's rollout adapter for sglang is already taken by 'stranger.adapter.StrangeServerAdapter'" in text
    assert "Uninstall one of the two plugins" in text


def test_model_that_sglang_cannot_hold(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    model = tmp_path / "dense-layers"
    model.mkdir()
    config = json.loads((Path(tiny_model("qwen3-moe")) / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    text = said(Setup(model=model), tmp_path)
    assert f"{MODEL}.path={model}: Qwen3MoeForCausalLM with mlp_only_layers=[0] cannot be synced to SGLang: " in text
    assert f"set {ROLLOUT}.custom.sync.enabled=False" in text


@pytest.mark.extended
def test_ia3_through_lora_adapter_path(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]).save_pretrained(str(adapter))
    text = said(Setup((*LORA, f"{MODEL}.lora_adapter_path={adapter}")), tmp_path)
    assert f"{MODEL}.lora_adapter_path='{adapter}' has peft_type=IA3" in text and "Give a LoRA adapter" in text


@pytest.mark.extended
def test_gemma_2_with_lora_on_the_embedding(tmp_path: Path) -> None:
    """The reason is ``unit/test_lora_keys``' subject; here it ends a run."""
    folder = tmp_path / "gemma-2"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    Gemma2Config(**sizes, architectures=["Gemma2ForCausalLM"]).save_pretrained(folder)
    text = said(Setup((*LORA, f"{MODEL}.lora.target_modules=[q_proj,embed_tokens]"), model=folder), tmp_path)
    assert f"{MODEL}.target_modules=['q_proj', 'embed_tokens']" in text
    assert "SGLang's Gemma2ForCausalLM computes logits with the embedding" in text
