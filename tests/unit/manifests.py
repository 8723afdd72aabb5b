# SPDX-License-Identifier: Apache-2.0
"""Manifests as large as those of real models, made by the real planner."""

from __future__ import annotations

from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.trainers.fsdp2 import even_chunks
from verl_sync_plugin.transport.protocol import Manifest

HIDDEN = 4096
ATTENTION = {"q_proj": HIDDEN, "k_proj": 1024, "v_proj": 1024, "o_proj": HIDDEN}


def manifest(layers: int, ranks: int, experts: int = 1) -> Manifest:
    """Of a dense model or a mixture of experts, sharded by FSDP2, in buckets of 512 MiB; 32 experts in 64 layers on 8
    ranks make 1.7 MB."""
    shapes = {"model.embed_tokens.weight": (32000, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}.weight": (rows, HIDDEN) for name, rows in ATTENTION.items()}
        for expert in range(experts):
            names = (f"{prefix}.mlp.experts.{expert}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
            shapes |= dict.fromkeys(names, (14336 // experts, HIDDEN))
    bases = [_base(name, shape, ranks) for name, shape in shapes.items()]
    return Manifest.of(plan_buckets(tuple(bases), 512 << 20, sharded=True))


def _base(name: str, shape: tuple[int, int], ranks: int) -> Base:
    numel = shape[0] * shape[1]
    return Base(name, "bfloat16", 2, even_chunks(shape[0], ranks, shape[1]), (View(name, shape, 0, numel),))
