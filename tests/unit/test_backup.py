# SPDX-License-Identifier: Apache-2.0
"""Whether SGLang keeps a host copy of its weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.rollouts.sglang.backup import COVERED_ARCHITECTURES, keep_cpu_backup

PLAIN = OmegaConf.create({"quantization": None})


def model(config: PretrainedConfig, lora_rank: int = 0, merge: bool = False) -> SimpleNamespace:
    """As much of verl's ``HFModelConfig`` as the decision looks at."""
    return SimpleNamespace(hf_config=config, lora_rank=lora_rank, lora={"merge": merge})


@pytest.mark.parametrize("architecture", sorted(COVERED_ARCHITECTURES))
def test_auto_is_off_for_covered_families(architecture: str) -> None:
    assert not keep_cpu_backup(SyncConfig(), PLAIN, model(LlamaConfig(architectures=[architecture])))


def test_auto_is_off_for_deepseek_v3_and_moonlight() -> None:
    """The result mla-7b-2gpu-megatron-bridge-ep2-tp2-full shows it on GPUs; DeepSeek-V2 was not run there."""
    moonlight = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], q_lora_rank=None, n_routed_experts=64)
    assert not keep_cpu_backup(SyncConfig(), PLAIN, model(moonlight))
    assert keep_cpu_backup(SyncConfig(), PLAIN, model(DeepseekV2Config(architectures=["DeepseekV2ForCausalLM"])))


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(architectures=["SomethingNewForCausalLM"]),
        Qwen2Config(architectures=["Qwen2ForCausalLM", "SomethingNewForCausalLM"]),
        Qwen2Config(architectures=[]),
        Qwen2Config(),
    ],
)
def test_auto_is_on_for_what_is_not_known(config: PretrainedConfig) -> None:
    assert keep_cpu_backup(SyncConfig(), PLAIN, model(config))


def test_auto_is_on_with_quantization() -> None:
    covered = model(Qwen2Config(architectures=["Qwen2ForCausalLM"]))
    assert keep_cpu_backup(SyncConfig(), OmegaConf.create({"quantization": "fp8"}), covered)


@pytest.mark.parametrize(("choice", "kept"), [("on", True), ("off", False)])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "SomethingNewForCausalLM"])
def test_the_user_decides(choice: str, kept: bool, architecture: str) -> None:
    chosen = SyncConfig(weights_cpu_backup=choice)
    assert keep_cpu_backup(chosen, PLAIN, model(Qwen2Config(architectures=[architecture]))) is kept


@pytest.mark.parametrize(("merge", "kept"), [(False, True), (True, False)])
def test_resident_weights_keep_verls_setting(merge: bool, kept: bool) -> None:
    """An engine that serves an adapter never releases its base, so the copy is never made."""
    adapted = model(Qwen2Config(architectures=["Qwen2ForCausalLM"]), 8, merge)
    assert keep_cpu_backup(SyncConfig(), PLAIN, adapted) is kept
