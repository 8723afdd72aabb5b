# SPDX-License-Identifier: Apache-2.0
"""On a CPU SGLang caps logits and looks back a window as transformers' Gemma 2 does."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cpu_stack import gemma2

HEADS, KEY_HEADS, POSITIONS, SIZE = 4, 2, 9, 8


def random_request() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, POSITIONS, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def by_transformers(cap: float | None, window: int) -> torch.Tensor:
    """transformers' own attention of Gemma 2; shape (1, positions, heads, size)."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    query, key, value = random_request()
    behind = torch.arange(POSITIONS).unsqueeze(1) - torch.arange(POSITIONS)
    mask = torch.zeros(POSITIONS, POSITIONS).masked_fill((behind < 0) | (behind > window), float("-inf"))
    layer = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, training=False, head_dim=SIZE)
    attended, _ = eager_attention_forward(layer, query, key, value, mask[None, None], scaling=0.5, softcap=cap)
    return attended


@pytest.mark.parametrize(("cap", "window"), [(0.7, 3), (0.7, -1), (0.0, 3)])
def test_it_is_what_transformers_computes(cap: float, window: int) -> None:
    expected = by_transformers(cap or None, window if window >= 0 else POSITIONS)
    query, key, value = random_request()
    settings: dict[str, Any] = {"cap": cap, "window": window, "scale": 0.5, "enable_gqa": True}
    prefilled = gemma2.capped_attention(query, key, value, is_causal=True, **settings)
    torch.testing.assert_close(prefilled.transpose(1, 2), expected)
    decoded = gemma2.capped_attention(query[:, :, -1:], key, value, **settings)
    torch.testing.assert_close(decoded.transpose(1, 2), expected[:, -1:])


def backend_module() -> ModuleType:
    """A module as SGLang's, with a backend that calls the module's function."""
    module = ModuleType("torch_native_backend")
    module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]

    class TorchNativeAttnBackend:
        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any) -> Any:
            return module.scaled_dot_product_attention(q, k, v, scale=0.5, is_causal=True, enable_gqa=True)

        forward_decode = forward_extend

    module.TorchNativeAttnBackend = TorchNativeAttnBackend  # type: ignore[attr-defined]
    return module


def test_only_layers_that_ask_for_it_get_it() -> None:
    module, request_ = backend_module(), random_request()
    plain = module.TorchNativeAttnBackend().forward_extend(*request_, None)
    gemma2.attend_as_the_layer_says(module)
    backend = module.TorchNativeAttnBackend()
    other = SimpleNamespace(logit_cap=0.0, sliding_window_size=-1)
    capped = SimpleNamespace(logit_cap=0.7, sliding_window_size=3)
    assert torch.equal(backend.forward_extend(*request_, other), plain)
    torch.testing.assert_close(backend.forward_extend(*request_, capped).transpose(1, 2), by_transformers(0.7, 3))
    assert torch.equal(backend.forward_decode(*request_, other), plain), "the layer after it is plain again"
