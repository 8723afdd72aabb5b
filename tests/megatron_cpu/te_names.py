# SPDX-License-Identifier: Apache-2.0
"""A model of Megatron's own layers under the names of TransformerEngine's: classes, and norms fused into the linear
layer behind them. What these layers compute is not there; what a bridge reads of them is."""

from __future__ import annotations

from typing import Any

import torch

from megatron_cpu.engines import Layout, build, stock_export
from megatron_cpu.stories import LARGE, TINY, check_same, manager_of, on_disk, one_sync
from verl_sync_plugin.trainers.megatron.model import unwrapped
from verl_sync_plugin.trainers.megatron.trainer import MegatronSource

# Of a layer: where a norm lies in Megatron's own layers, and the linear layer that TransformerEngine fuses it into
FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
CLASSES = {
    "ColumnParallelLinear": "TEColumnParallelLinear",
    "RowParallelLinear": "TERowParallelLinear",
    "ColumnParallelGroupedLinear": "TEColumnParallelGroupedLinear",
    "RowParallelGroupedLinear": "TERowParallelGroupedLinear",
    "WrappedTorchNorm": "TENorm",
}


def _find(module: torch.nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _rename(module: Any, name: str) -> None:
    module.__class__ = type(name, (type(module),), {})


def as_transformer_engine(engine: Any) -> set[str]:
    """Renames in place; returns the names of all parameters."""
    names: set[str] = set()
    for chunk in map(unwrapped, engine.module):
        for layer in chunk.decoder.layers:
            for norm_path, linear_path in FUSED.items():
                norm, linear = _find(layer, norm_path), _find(layer, linear_path)
                if linear is None or getattr(norm, "weight", None) is None:
                    continue
                linear.register_parameter("layer_norm_weight", norm._parameters.pop("weight"))
                _rename(linear, "TELayerNormColumnParallelLinear")
            for module in list(layer.modules()):
                if type(module).__name__ in CLASSES:
                    _rename(module, CLASSES[type(module).__name__])
        names |= {name for name, _ in chunk.named_parameters()}
    return names


def syncs(model_path: str, layout: Layout) -> set[str]:
    """Bit for bit the checkpoint, which is what the bridge exports; returns the names."""
    engine = build(model_path, layout)
    names = as_transformer_engine(engine)
    disk = on_disk(model_path)
    check_same({n: t.to(disk[n].dtype) for n, t in stock_export(engine).items()}, disk)
    for size in (TINY, LARGE):
        manager = manager_of(engine, size)
        got = one_sync(manager)
        assert isinstance(manager.source, MegatronSource), "the bridge's own stream was used"
        check_same({n: t.to(disk[n].dtype) for n, t in got.items()}, disk)
    return names
