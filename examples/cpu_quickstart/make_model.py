# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny checkpoint with random weights and a byte-level tokenizer: ``make_model.py KIND FOLDER [SEED]``."""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# 4 attention heads and 2 key/value heads: can be split over two tensor parallel ranks.
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
KINDS: dict[str, tuple[type, type[PreTrainedModel], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 4,  # all: a choice of some would hang on how numbers are rounded
            "moe_intermediate_size": 64,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "mixtral-tied": (
        MixtralConfig,
        MixtralForCausalLM,
        {"tie_word_embeddings": True, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",  # as in published checkpoints; SGLang reads this one
            "query_pre_attn_scalar": 16,
            # Small enough to matter: logits are larger, and prompts longer
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 5.0,
            "sliding_window": 16,
        },
    ),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, so that any text can be encoded without training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Make a model of one of ``KINDS`` with random bfloat16 weights."""
    config_class, model_class, settings = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**COMMON, **settings)).to(torch.bfloat16)
    for parameter in model.parameters():
        # The default deviation of 0.02 gives nearly equal logits: a wrong weight would hardly show.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    make_tokenizer().save_pretrained(arguments.folder)
    model = make_model(arguments.kind, arguments.seed)
    model.save_pretrained(arguments.folder)
    print(f"{arguments.kind}: {model.num_parameters():,} parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
