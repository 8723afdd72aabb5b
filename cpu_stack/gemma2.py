# SPDX-License-Identifier: Apache-2.0
"""Adds to SGLang's CPU path what Gemma 2 needs: logits that are capped, and attention that looks back a window only.

SGLang caps the final logits by a Triton kernel, and its torch-native attention ignores both a layer's cap and its
window. Without a GPU there is no Triton, and no other attention backend that knows them: ``intel_amx`` needs a CPU
build of sgl_kernel, and passes on no window.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def cap_logits(logits_processor: ModuleType) -> None:
    """Replace the Triton kernel that caps the final logits, in place."""

    def fused_softcap(full_logits: Any, final_logit_softcapping: float) -> Any:
        return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)

    logits_processor.fused_softcap = fused_softcap  # type: ignore[attr-defined]


def attend_as_the_layer_says(torch_native_backend: ModuleType) -> None:
    """Let torch-native attention cap its logits and look back a window, for layers that ask for it.

    The backend computes attention by one function of torch, and tells it neither. So it gets another function while
    such a layer runs; a scheduler process runs one layer at a time.
    """
    backend = torch_native_backend.TorchNativeAttnBackend
    plain = torch_native_backend.scaled_dot_product_attention

    def of_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def attend(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            cap, window = layer.logit_cap or 0.0, layer.sliding_window_size
            window = -1 if window is None else window
            if cap <= 0 and window < 0:
                return forward(self, q, k, v, layer, *args, **kwargs)
            other = functools.partial(capped_attention, cap=cap, window=window)
            torch_native_backend.scaled_dot_product_attention = other  # type: ignore[attr-defined]
            try:
                return forward(self, q, k, v, layer, *args, **kwargs)
            finally:
                torch_native_backend.scaled_dot_product_attention = plain  # type: ignore[attr-defined]

        return attend

    backend.forward_extend = of_layer(backend.forward_extend)
    backend.forward_decode = of_layer(backend.forward_decode)


def capped_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    cap: float,
    window: int,
    scale: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Any:
    """Attention of one request, with capped logits and a window. ``query`` is of its last positions, shape (1, heads,
    queries, head size), ``key`` and ``value`` of all, shape (1, key heads, positions, head size). A tanh brings logits
    between ``-cap`` and ``cap`` (0 leaves them); a query sees ``window`` positions before its own (below 0: all), and,
    if ``is_causal``, none after it; else it is the one query of a decode, the last. With ``enable_gqa`` heads share a
    key.
    """
    import torch

    if enable_gqa:
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    logits = (query @ key.transpose(-1, -2)).float() * scale
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    queries, positions = logits.shape[-2:]
    own = torch.arange(positions - queries, positions, device=logits.device).unsqueeze(1)
    behind = own - torch.arange(positions, device=logits.device)
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if is_causal:
        hidden |= behind < 0
    if window >= 0:
        hidden |= behind > window
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1).to(query.dtype) @ value
