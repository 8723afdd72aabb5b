# SPDX-License-Identifier: Apache-2.0
"""Megatron and mbridge without TransformerEngine, which does not exist for the CPU and is not on every GPU machine.

Megatron's own layers, under the names that mbridge's tables know, and grouped experts for them.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from cpu_stack import megatron_bridge

# Norms of latent attention: Megatron's own module, and the one TransformerEngine fuses it into
_FUSED_NORMS = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}


def register_hooks() -> None:
    """Register the post-import hooks for megatron-core and mbridge; a module already imported is changed at once."""
    for module_name, hook in _HOOKS.items():
        register_post_import_hook(hook, module_name)
    megatron_bridge.register_hooks()


def _accept_padding_mask(dot_product_attention: ModuleType) -> None:
    """Translate attention masks.

    verl passes a [batch, seq] mask of tokens to keep, as TransformerEngine wants it; Megatron's own attention wants
    a [batch, 1, seq, seq] mask of positions to hide. Latent attention names its head sizes, which Megatron's own does
    not know: it takes the values' heads for as wide as the model's others.
    """
    import torch

    attention: Any = dot_product_attention.DotProductAttention
    stock_init, stock_forward = attention.__init__, attention.forward

    @functools.wraps(stock_init)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        stock_init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    @functools.wraps(stock_forward)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            length = attention_mask.shape[1]
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=attention_mask.device), 1)
            attention_mask = future[None, None] | ~attention_mask.bool()[:, None, None, :]
        return stock_forward(self, query, key, value, attention_mask, *args, **kwargs)

    attention.__init__, attention.forward = init, forward


def _name_absent_layers(multi_latent_attention: ModuleType) -> None:
    """Put classes of which there are no instances for TransformerEngine's, so that ``isinstance`` can ask for them."""
    for name, value in list(vars(multi_latent_attention).items()):
        if name.startswith("TE") and not isinstance(value, type):
            setattr(multi_latent_attention, name, type(name, (), {}))


def _use_local_layers(llm_bridge: ModuleType) -> None:
    """Build layers from Megatron's own modules."""
    namespace: Any = llm_bridge
    stock_spec = namespace.get_gpt_decoder_block_spec

    @functools.wraps(stock_spec)
    def get_spec(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        return stock_spec(config, use_transformer_engine=False, **kwargs)

    namespace.get_gpt_decoder_block_spec = get_spec


def _map_local_norm_names(bridge: ModuleType) -> None:
    """Teach mbridge the local layers' names: its tables know only TransformerEngine's fused norms."""
    bridge_class: Any = bridge.Bridge
    stock_attention = bridge_class._weight_name_mapping_attention
    stock_mapping = bridge_class._weight_name_mapping_mcore_to_hf

    @functools.wraps(stock_mapping)
    def mapping(self: Any, mcore_weights_name: str) -> list[str]:
        name = mcore_weights_name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        if not any("pre_mlp_layernorm" in known for known in self._MLP_MAPPING):
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return stock_mapping(self, name)

    @functools.wraps(stock_attention)
    def attention(self: Any, name: str) -> list[str]:
        for local, fused in _FUSED_NORMS.items():
            if not any(local in known for known in self._ATTENTION_MAPPING):
                name = name.replace(f".{local}.weight", f".{fused}.layer_norm_weight")
        return stock_attention(self, name)

    bridge_class._weight_name_mapping_mcore_to_hf = mapping
    bridge_class._weight_name_mapping_attention = attention


def _group_experts(backends: ModuleType) -> None:
    """Give Megatron's own layers grouped experts, which come with TransformerEngine alone."""
    import inspect

    namespace: Any = backends
    stock = namespace.LocalSpecProvider.grouped_mlp_modules
    # Up to megatron-core 0.16 a pair of class and layers, later something to call
    is_pair = "moe_use_legacy_grouped_gemm" in inspect.signature(stock).parameters

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe import experts

        from cpu_stack.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear

        layers = {"linear_fc1": ColumnParallelGroupedLinear, "linear_fc2": RowParallelGroupedLinear}
        if is_pair:
            return experts.TEGroupedMLP, MLPSubmodules(**layers)
        if not moe_use_grouped_gemm:
            return stock(self, moe_use_grouped_gemm)
        return functools.partial(experts.TEGroupedMLP, submodules=experts.GroupedMLPSubmodules(**layers))

    namespace.LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


def _name_absent_gemm(moe_utils: ModuleType) -> None:
    """The router asks whether TransformerEngine's multiplication is None; where it is absent, so is the name."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.transformer.dot_product_attention": _accept_padding_mask,
    "megatron.core.transformer.multi_latent_attention": _name_absent_layers,
    "megatron.core.transformer.moe.moe_utils": _name_absent_gemm,
    "mbridge.core.llm_bridge": _use_local_layers,
    "mbridge.core.bridge": _map_local_norm_names,
    "megatron.core.models.backends": _group_experts,
}
