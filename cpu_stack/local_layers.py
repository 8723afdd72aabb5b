# SPDX-License-Identifier: Apache-2.0
"""Megatron without TransformerEngine, which does not exist for the CPU and is not on every GPU machine: its own layers,
and grouped experts for them."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from cpu_stack import megatron_bridge


def register_hooks() -> None:
    """Register the post-import hooks for megatron-core; a module already imported is changed at once."""
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


def _group_experts(backends: ModuleType) -> None:
    """Give Megatron's own layers grouped experts, which come with TransformerEngine alone."""
    namespace: Any = backends
    stock = namespace.LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool) -> Any:
        from megatron.core.transformer.moe import experts

        from cpu_stack.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear

        layers = {"linear_fc1": ColumnParallelGroupedLinear, "linear_fc2": RowParallelGroupedLinear}
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
    "megatron.core.models.backends": _group_experts,
}
