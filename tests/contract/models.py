# SPDX-License-Identifier: Apache-2.0
"""Tiny HF models with odd sizes, so that shards are uneven and some ranks hold nothing of a parameter."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 323
SIZES = {
    "hidden_size": 60, "intermediate_size": 85, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 10,
}  # fmt: skip
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 21}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
}


def build(name: str) -> PreTrainedModel:
    """The model in fp32, the same on every rank, with persistent buffers of three kinds."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data.normal_()  # also norms and biases, which start as ones and zeros
    model.model.layers[0].mlp.register_buffer("e_score_correction_bias", torch.randn(5))
    model.model.layers[1].register_buffer("count", torch.tensor(3))
    model.register_buffer("scratch", torch.randn(4), persistent=False)
    assert isinstance(model, PreTrainedModel)
    return model


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A real forward, backward and update; weight decay moves every parameter. Buffers change too."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for _, buffer in model.named_buffers():
        if buffer.numel() in (1, 5):
            buffer.add_(1)
