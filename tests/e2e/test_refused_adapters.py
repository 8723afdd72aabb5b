# SPDX-License-Identifier: Apache-2.0
"""Adapters that would be served wrong end ``main_ppo`` in its driver, by name, before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import IA3Config
from transformers import Gemma2Config

from e2e.runs import Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora.rank=8", f"{MODEL}.lora.merge=True")


def said(folder: Path, model: Path | None, *overrides: str) -> str:
    """The last line of a run that ends in the driver."""
    run = main_ppo(Setup((*LORA, *overrides), model=model), folder)
    assert run.returncode == 1 and not run.timed_out, run.tail
    assert not run.matching("Started a local Ray instance|sharding manager"), run.tail
    lines = run.matching("^verl-sync-plugin: ")
    assert len(lines) == 1, run.tail
    return lines[0].text


def test_ia3_through_lora_adapter_path(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]).save_pretrained(str(adapter))
    text = said(tmp_path, None, f"{MODEL}.lora_adapter_path={adapter}")
    assert f"{MODEL}.lora_adapter_path='{adapter}' has peft_type=IA3" in text and "Give a LoRA adapter" in text


def test_gemma_2_with_lora_on_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "gemma-2"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    Gemma2Config(**sizes, architectures=["Gemma2ForCausalLM"]).save_pretrained(folder)
    text = said(tmp_path, folder, f"{MODEL}.lora.target_modules=[q_proj,embed_tokens]")
    assert f"{MODEL}.target_modules=['q_proj', 'embed_tokens']" in text
    assert "SGLang's Gemma2ForCausalLM computes logits with the embedding" in text
