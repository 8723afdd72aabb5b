# SPDX-License-Identifier: Apache-2.0
"""verl's own Megatron engine with the plugin's export, in a process of a test world on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# The switch of the CPU stack for Megatron; the .pth file reads it while Python starts
CPU_MEGATRON = {"VERL_PLATFORM": "cpu", "VERL_CPU_MCORE": "1"}
# What Megatron's own (not TransformerEngine's) layers need on a CPU
LOCAL_LAYERS: dict[str, Any] = {
    "sequence_parallel": False,
    "use_cpu_initialization": True,
    "attention_backend": "unfused",
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "persist_layer_norm": False,
}


@dataclass(frozen=True)
class Layout:
    """A parallel layout of the trainer; ``world`` beyond what it needs is data parallelism."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp, "cp": self.cp}
        named = [f"{name}{size}" for name, size in sizes.items() if size not in (None, 1) or (name == "etp" and size)]
        return "-".join([*named, f"world{self.world}"])


@contextmanager
def megatron_environment() -> Iterator[None]:
    """Processes started inside have Megatron on the CPU."""
    before = {name: os.environ.get(name) for name in CPU_MEGATRON}
    os.environ.update(CPU_MEGATRON)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def build(model_path: str, layout: Layout) -> Any:
    """verl's registered Megatron engine, initialized; ends any earlier one's process groups."""
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    parallel_state.destroy_model_parallel()
    model = HFModelConfig(path=model_path, use_remove_padding=False)
    _bring_deepseek_up_to_date(model.hf_config)
    # Megatron's own attention cannot compute with context parallelism; its groups are real nevertheless
    overrides = {**LOCAL_LAYERS, **({"context_parallel_size": 1} if layout.cp > 1 else {})}
    engine = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        sequence_parallel=False,
        vanilla_mbridge=True,
        use_mbridge=True,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        override_transformer_config=overrides,
    )
    optimizer = McoreOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=10)
    built = EngineRegistry.new("language_model", "megatron", model, engine, optimizer, CheckpointConfig())
    assert type(built).__name__ == "SyncMegatronEngineWithLMHead", "verl does not build the plugin's engine"
    built.initialize()
    return built


def _bring_deepseek_up_to_date(hf_config: Any) -> None:
    """mbridge 0.15.1's DeepSeek bridge is older than this Megatron and this transformers: two names have changed.

    Of the bridge only its configuration is touched; names and conversions are its own.
    """
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core.transformer import MLATransformerConfig

    def config(max_position_embeddings: int, **kwargs: Any) -> MLATransformerConfig:
        return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **kwargs)

    DeepseekV3Bridge.TransformerConfigClass = staticmethod(config)
    if not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    # A tied model leaves its mapping in the class, for every later model of the process
    Qwen2Bridge._DIRECT_MAPPING["output_layer.weight"] = "lm_head.weight"


def train_step(engine: Any) -> None:
    """A real optimizer step that changes every parameter and router bias."""
    from verl.utils.megatron_utils import unwrap_model

    for chunk in engine.module:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.5)
        for name, buffer in unwrap_model(chunk).named_buffers():
            if "expert_bias" in name:
                buffer.add_(1)
    engine.optimizer_step()


def stock_export(engine: Any) -> dict[str, torch.Tensor]:
    """What verl itself would send: mbridge's own export. Collective."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in engine.bridge.export_weights(engine.module):
        if name in found:
            assert torch.equal(found[name], tensor), f"{name} is exported twice and differs"
        found[name] = tensor.detach().clone()
    return found
