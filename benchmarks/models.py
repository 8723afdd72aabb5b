# SPDX-License-Identifier: Apache-2.0
"""Random-weight models of real shapes, a byte-level tokenizer and prompts: a benchmark run needs no download."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

DONE = ".complete"
# the last one is for verl, which wants it of every model of DeepSeek's kind
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# 7b: the shapes of Qwen2.5-7B (7.6 B parameters); 14b: of Qwen2.5-14B (14.8 B); 1p8b: of Qwen2.5-1.5B with an untied
# head; moe-8b: half the layers and half the experts of Qwen3-30B-A3B, which with Megatron's optimizer is what two
# devices of 141 GB hold; moe-19k: all its layers and experts, hence its 18,867 tensors, with experts half as wide
def _dense(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def _moe(layers: int) -> dict[str, Any]:
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    return _dense(2048, 6144, layers, 32, 4, 151936, **experts)


# mla-7b: Moonlight-16B-A3B (latent attention, shared experts, router bias) with 12 of its 27 layers, as many as two
# devices hold next to Megatron's optimizer
_LATENT_ATTENTION: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.446,
    "rope_parameters": {  # DeepSeek-V3's; SGLang has no other rotary embedding for latent attention on a CPU
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_MLA_EXPERTS = {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}
_TINY_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "7b": _dense(3584, 18944, 28, 28, 4, 152064),
    "14b": _dense(5120, 13824, 48, 40, 8, 152064),
    "1p8b": _dense(1536, 8960, 28, 12, 2, 151936),
    "moe-8b": _moe(24),
    "moe-19k": {**_moe(48), "num_experts": 128, "moe_intermediate_size": 384},
    "mixtral-2b": _dense(2048, 4096, 8, 16, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "mla-7b": _dense(2048, 11264, 12, 16, 16, 163840, **_LATENT_ATTENTION, **_MLA_EXPERTS),
    "small": _dense(512, 1536, 8, 8, 2, 320),
    "tiny": _dense(64, 128, 2, 4, 2, 320),
    "tiny-moe": _dense(64, 128, 2, 4, 2, 320, head_dim=16, num_experts=4, **_TINY_EXPERTS),
    "tiny-mla": _dense(64, 128, 2, 4, 4, 320, n_routed_experts=4, **_TINY_EXPERTS, **_LATENT_ATTENTION),
}


def write_tokenizer(out: Path) -> None:
    """Makes a tokenizer with a token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call,unused-ignore]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def config_of(size: str) -> Any:
    """The configuration of ``size``: a Qwen2 model, or a Qwen3-MoE, DeepSeek-V3 or Mixtral one where it has experts."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen2Config, Qwen3MoeConfig

    fixed: dict[str, Any] = {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    kinds = {"num_experts": Qwen3MoeConfig, "n_routed_experts": DeepseekV3Config, "num_local_experts": MixtralConfig}
    kind = next((kinds[key] for key in kinds if key in SHAPES[size]), Qwen2Config)
    return kind(**SHAPES[size], **fixed)


def write_model(size: str, out: Path, device: str) -> None:
    """Saves a random bfloat16 model of ``size`` to ``out``; a complete one already there is kept."""
    if (out / DONE).exists():
        return
    import torch
    from transformers import AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
    model.save_pretrained(out, max_shard_size="20GB")
    (out / DONE).touch()


def write_prompts(path: Path, rows: int, tokens: int) -> None:
    """Writes ``rows`` prompts of about ``tokens`` tokens in verl's form; the chat template takes some 30 of them."""
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": f"{index}+1=".rjust(tokens - 32)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
            "extra_info": {"index": index},
        }
        for index in range(rows)
    ).to_parquet(path)


def main(argv: list[str] | None = None) -> None:
    """Makes a model; a process of its own, so that the device memory goes back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    start = time.time()
    write_model(args.size, args.out, args.device)
    print(f"model {args.size} in {args.out}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
