"""Tiny HF checkpoints of every kind that Megatron and mbridge build here."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

MAKE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "cpu_quickstart" / "make_model.py"

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Latent attention, a dense first layer, shared experts, a router with a bias buffer
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**COMMON),
    "qwen2-tied": Qwen2Config(**{**COMMON, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(**COMMON, **MOE, head_dim=16, num_experts=4),
    "moonlight": DeepseekV3Config(**{**COMMON, **LATENT}, q_lora_rank=None),
    "deepseek": DeepseekV3Config(**{**COMMON, **LATENT}, q_lora_rank=40),
}


def write(kind: str, folder: Path) -> str:
    """Writes a checkpoint in bfloat16 with random weights, norms, biases and router bias; returns its path."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.1)
    runpy.run_path(str(MAKE_MODEL))["make_tokenizer"]().save_pretrained(folder)
    # In several files: mbridge's DeepSeek bridge insists on an index
    model.save_pretrained(folder, max_shard_size="100KB")
    return str(folder)
