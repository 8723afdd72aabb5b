# SPDX-License-Identifier: Apache-2.0
"""What the transfer benchmark moves: real shapes, as the HF checkpoint names them, filled with random numbers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
}
# Qwen3-30B-A3B with half of its experts, and with experts half as wide: twice the tensors, equal bytes
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **SHAPES["moe-8b"],
    "num_hidden_layers": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}
_TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense-1p8b": {**_QWEN2, **SHAPES["1p8b"]},
    "dense-7b": {**_QWEN2, **SHAPES["7b"]},
    "moe-8b": {**_MOE, "num_hidden_layers": 24},
    "moe-10k": _MOE,
    "moe-19k": {**_MOE, "num_experts": 128, "moe_intermediate_size": 384},
    "small": {**_QWEN2, **SHAPES["small"]},
    "tiny": {**_QWEN2, **SHAPES["tiny"]},
    "tiny-moe": {
        **_MOE, **_TINY, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    # as many tensors as moe-19k, for what the host does with each
    "tiny-moe-19k": {
        **_MOE, **_TINY, "num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
        "num_experts": 128,
    },
}  # fmt: skip


def write_config(kind: str, folder: Path) -> Path:
    """Writes ``config.json`` for a server that makes up its own weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **CONFIGS[kind]}), encoding="utf-8")
    return folder


def shapes(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the model."""
    c = CONFIGS[kind]
    hidden = c["hidden_size"]
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (c["vocab_size"], hidden))]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found += _attention(c, f"{prefix}self_attn.") + _mlp(c, f"{prefix}mlp.")
        found += [(f"{prefix}{norm}_layernorm.weight", (hidden,)) for norm in ("input", "post_attention")]
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (c["vocab_size"], hidden))]


def _attention(c: dict[str, Any], prefix: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden = c["hidden_size"]
    head = c.get("head_dim", hidden // c["num_attention_heads"])
    rows = {"q": c["num_attention_heads"] * head, "k": c["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    found: list[tuple[str, tuple[int, ...]]] = [(f"{prefix}{x}_proj.weight", (rows[x], hidden)) for x in "qkv"]
    found.append((f"{prefix}o_proj.weight", (hidden, rows["q"])))
    if c["model_type"] == "qwen2":
        return [*found, *((f"{prefix}{x}_proj.bias", (rows[x],)) for x in "qkv")]
    return [*found, *((f"{prefix}{x}_norm.weight", (head,)) for x in "qk")]


def _mlp(c: dict[str, Any], prefix: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    parts = [prefix]
    found: list[tuple[str, tuple[int, ...]]] = []
    if "num_experts" in c:
        inner = c["moe_intermediate_size"]
        parts = [f"{prefix}experts.{expert}." for expert in range(c["num_experts"])]
        found.append((f"{prefix}gate.weight", (c["num_experts"], hidden)))
    for part in parts:
        found += [(f"{part}gate_proj.weight", (inner, hidden)), (f"{part}up_proj.weight", (inner, hidden))]
        found.append((f"{part}down_proj.weight", (hidden, inner)))
    return found


def weights(kind: str, device: str, dtype: str, folder: Path) -> list[tuple[str, Any]]:
    """Random tensors: on a GPU each an allocation of its own as a trainer's parameters are, on a CPU in one file in
    ``folder``, which other processes can map as they can all device memory."""
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    made = []
    for (name, _), tensor in zip(shapes(kind), _memory(kind, device, getattr(torch, dtype), folder), strict=True):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        made.append((name, tensor))
    return made


def _memory(kind: str, device: str, dtype: Any, folder: Path) -> Iterator[Any]:
    import torch

    wanted = [shape for _, shape in shapes(kind)]
    if device != "cpu":
        yield from (torch.empty(shape, dtype=dtype, device=device) for shape in wanted)
        return
    places = [0, *itertools.accumulate(math.prod(shape) + -math.prod(shape) % 8 for shape in wanted)]  # 16-byte steps
    storage = torch.UntypedStorage.from_file(str(folder / f"{kind}.weights"), True, places[-1] * dtype.itemsize)
    flat = torch.empty(0, dtype=dtype).set_(storage)
    yield from (
        flat[place : place + math.prod(shape)].view(shape) for place, shape in zip(places, wanted, strict=False)
    )
