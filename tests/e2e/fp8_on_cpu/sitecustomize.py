# SPDX-License-Identifier: Apache-2.0
"""Has SGLang multiply with fp8 weights on any CPU, as on GPUs; by itself it packs them for AMX."""

from types import ModuleType
from typing import Any

import wrapt


def _as_on_a_gpu(fp8: ModuleType) -> None:
    fp8._is_cpu = False  # type: ignore[attr-defined]
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: _multiply  # type: ignore[attr-defined]


def _multiply(
    input: Any, weight: Any, block_size: list[int], weight_scale: Any, input_scale: Any = None, bias: Any = None
) -> Any:
    """The product with the weights that blocks of fp8 and their scales stand for."""
    import torch

    (rows, columns), blocks = weight.shape, weight_scale.repeat_interleave(block_size[0], 0)
    scales = blocks.repeat_interleave(block_size[1], 1)[:rows, :columns]
    return torch.nn.functional.linear(input, (weight.float() * scales).to(input.dtype), bias)


wrapt.register_post_import_hook(_as_on_a_gpu, "sglang.srt.layers.quantization.fp8")
