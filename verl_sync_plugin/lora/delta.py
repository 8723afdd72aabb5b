# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas for some rows of a weight. The arithmetic is PEFT's own.

``get_delta_weight`` of PEFT's layers computes ``scaling * B @ A`` (and its relatives) from whatever factors the layer
holds. Here it runs on a stand-in of the layer that holds only the rows asked for, in fp32, so scaling, rsLoRA, rank and
alpha patterns follow PEFT, and the base weight is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from verl_sync_plugin.lora.weights import Kind, LoRAWeight

Factors = Mapping[str, torch.Tensor]


def delta_rows(weight: LoRAWeight, shape: tuple[int, ...], factors: Factors, begin: int, end: int) -> torch.Tensor:
    """Rows ``[begin, end)`` of the delta that PEFT would add to a weight.

    Args:
        weight: which one.
        shape: of the whole weight. A row is what lies under one index of the first dimension; for a linear weight of
            more than two dimensions, of all but the last.
        factors: whole factors by state-dict key. A ``(r, in)``, B ``(out, r)``; of an embedding ``(r, num_embeddings)``
            and ``(embedding_dim, r)``; of fused experts ``(E * r, in)`` and ``(out, r * E)``; of a convolution
            ``(r, in, *kernel)`` and ``(out, r, 1, ...)``; of a bias only B, ``(out,)``.

    Returns:
        fp32 of shape ``(end - begin, weight.columns(shape))``.

    Source: ``get_delta_weight`` of ``peft.tuners.lora.layer``'s ``Linear``, ``Embedding``, ``_ConvNd``,
    ``ParamWrapper``, and the handling of ``lora_bias`` in ``Linear.merge``.
    """
    b = factors[weight.b].float()
    if weight.kind is Kind.BIAS:
        return (b[begin:end] * weight.scaling).unsqueeze(1)
    a = factors[weight.a].float()
    if weight.kind is Kind.EXPERTS:
        delta = _experts(weight, a, b, begin, end)
    elif weight.kind is Kind.CONV:
        # No kernel size: PEFT's special case for 1x1 kernels gives the same but cannot do three dimensions
        base = SimpleNamespace(weight=SimpleNamespace(size=lambda: ()), groups=1)
        delta = _pefts(weight, a, b[begin:end], get_base_layer=lambda: base, conv_fn=weight.layer.conv_fn)
    elif weight.transposed:
        delta = _pefts(weight, a[:, begin:end], b, fan_in_fan_out=True)
    else:
        delta = _pefts(weight, a, b[begin:end], fan_in_fan_out=False)
    return delta.reshape(end - begin, weight.columns(shape))


def _experts(weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The delta of experts ``[begin, end)``: PEFT keeps A expert by expert, but B rank by rank."""
    experts, count = weight.layer.num_experts, end - begin
    rank = a.shape[0] // experts
    a = a[begin * rank : end * rank]
    b = b.reshape(b.shape[0], rank, experts)[:, :, begin:end].reshape(b.shape[0], rank * count)
    swapped = weight.layer._did_swap_in_out_features
    # PEFT takes one expert for a linear layer, whose delta is (out, in)
    return _pefts(
        weight,
        a,
        b,
        num_experts=count,
        fan_in_fan_out=count == 1 and not swapped,
        _did_swap_in_out_features=swapped,
        get_param=lambda: SimpleNamespace(dtype=a.dtype, device=a.device),
    )


def _pefts(weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor, **held: Any) -> torch.Tensor:
    """The delta that ``get_delta_weight`` of the layer's class computes from these factors."""
    adapter, layer = weight.adapter, type(weight.layer)
    if weight.kind is Kind.LINEAR:
        # A wrapped 2-D parameter is a linear layer to PEFT
        from peft.tuners.lora import Linear as layer
    stand_in = SimpleNamespace(
        scaling=weight.layer.scaling,
        lora_A={adapter: SimpleNamespace(weight=a)},
        lora_B={adapter: SimpleNamespace(weight=b)},
        lora_embedding_A={adapter: a},
        lora_embedding_B={adapter: b},
        **held,
    )
    delta: torch.Tensor = layer.get_delta_weight(stand_in, adapter)
    return delta
