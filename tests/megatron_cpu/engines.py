# SPDX-License-Identifier: Apache-2.0
"""verl's own Megatron engine with the plugin's export, in a process of a test world on the CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The switch of the CPU stack for Megatron; the .pth file reads it while Python starts
CPU_MEGATRON = {"VERL_PLATFORM": "cpu", "VERL_CPU_MCORE": "1"}
# What Megatron's own (not TransformerEngine's) layers need on a CPU
LOCAL_LAYERS: dict[str, Any] = {
    "sequence_parallel": False, "use_cpu_initialization": True, "attention_backend": "unfused",
    "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "masked_softmax_fusion": False, "bias_activation_fusion": False, "persist_layer_norm": False,
}  # fmt: skip
# And what Megatron-Bridge turns on by itself
NO_FUSION: dict[str, Any] = {
    "moe_permute_fusion": False, "moe_router_fusion": False, "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False, "transformer_impl": "local",
}  # fmt: skip
MEGATRON_BRIDGE = Path(sys.prefix) / "megatron-bridge"  # see scripts/setup_venv.sh


@dataclass(frozen=True)
class Layout:
    """A parallel layout of the trainer; ``size``, in ranks, beyond what it needs is data parallelism."""

    size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp, "cp": self.cp}
        named = [f"{name}{size}" for name, size in sizes.items() if size not in (None, 1) or (name == "etp" and size)]
        return "-".join([*named, f"world{self.size}"])


@contextmanager
def megatron_environment() -> Iterator[None]:
    """Processes started inside have Megatron on the CPU, with Megatron-Bridge."""
    wanted = dict(CPU_MEGATRON)
    wanted["PYTHONPATH"] = os.pathsep.join([str(MEGATRON_BRIDGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(MEGATRON_BRIDGE))  # a spawned process gets its parent's path
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        sys.path.remove(str(MEGATRON_BRIDGE))
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def build(model_path: str, layout: Layout, lora: dict[str, Any] | None = None, **transformer: Any) -> Any:
    """Initializes verl's Megatron engine, and ends earlier process groups; ``transformer``: more of its overrides."""
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    parallel_state.destroy_model_parallel()
    model = HFModelConfig(path=model_path, use_remove_padding=False, **({"lora": lora} if lora else {}))
    # Megatron's own attention cannot compute with context parallelism; its groups are real nevertheless
    overrides = {**LOCAL_LAYERS, **({"context_parallel_size": 1} if layout.cp > 1 else {}), **NO_FUSION, **transformer}
    engine = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        sequence_parallel=False,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        override_transformer_config=overrides,
    )
    optimizer = McoreOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=10)
    built = EngineRegistry.new("language_model", "megatron", model, engine, optimizer, CheckpointConfig())
    assert type(built).__name__ == "SyncMegatronEngineWithLMHead", "verl does not build the plugin's engine"
    built.initialize()
    return built


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model inside Megatron's wrappers."""
    from verl.utils.megatron_utils import unwrap_model

    return unwrap_model(chunk)


def train_step(engine: Any) -> None:
    """A real optimizer step that changes every parameter and router bias."""
    for chunk in engine.module:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(0.5)
        for name, buffer in unwrapped(chunk).named_buffers():
            if "expert_bias" in name:
                buffer.add_(1)
    engine.optimizer_step()


def stock_export(engine: Any) -> dict[str, torch.Tensor]:
    """Returns what verl itself would send: the bridge's own export, LoRA merged. All ranks call it together."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in engine.bridge.export_hf_weights(engine.module, cpu=True, show_progress=False):
        if name == "lm_head.weight" and engine.model_config.hf_config.tie_word_embeddings:
            continue  # Megatron-Bridge exports a tied embedding under both names where the checkpoint has both
        if name in found:
            assert torch.equal(found[name], tensor), f"{name} is exported twice and differs"
        found[name] = tensor.detach().clone()
    return found
