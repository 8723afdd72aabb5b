# SPDX-License-Identifier: Apache-2.0
"""Tiny HF checkpoints of every kind that Megatron builds here."""

import copy
import runpy
from pathlib import Path
from typing import Any

import torch
import transformers

from contract import families
from tiny_models import MAKE_MODEL

COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Latent attention, a dense first layer, shared experts, a router with a bias buffer
LATENT: dict[str, Any] = {
    **families.LATENT, **COMMON, **MOE, "num_key_value_heads": 8, "n_shared_experts": 2, "topk_method": "noaux_tc",
    "kv_lora_rank": 24, "n_group": 1,
}  # fmt: skip
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen2-tied": transformers.Qwen2Config(**{**COMMON, "tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": transformers.Qwen3MoeConfig(**COMMON, **MOE, head_dim=16, num_experts=4),
    "moonlight": transformers.DeepseekV3Config(**{**LATENT, "q_lora_rank": None}),
    "deepseek": transformers.DeepseekV3Config(**{**LATENT, "q_lora_rank": 40}),
}


# SGLang pads on a CPU whatever is no multiple of 32 on each rank, and may leave the padding as it was
FOR_SGLANG = {"intermediate_size": 128, "moe_intermediate_size": 64}


def write(kind: str, folder: Path, **sizes: int) -> str:
    """Writes a checkpoint in bfloat16 with random weights, norms, biases and router bias; returns its path."""
    torch.manual_seed(5)
    config = copy.deepcopy(CONFIGS[kind])
    config.update(sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            # Norms around 1: with small ones all tokens are as good as equally likely, and a wrong weight hardly shows
            tensor.data.normal_(mean=float("norm" in name), std=0.1)
    runpy.run_path(str(MAKE_MODEL))["make_tokenizer"]().save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="100KB")
    return str(folder)
