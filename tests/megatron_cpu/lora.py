# SPDX-License-Identifier: Apache-2.0
"""Engines with LoRA adapters of Megatron-Bridge."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from megatron_cpu.engines import Layout, build

LORA: dict[str, Any] = {
    "type": "lora", "rank": 8, "alpha": 16, "merge": True,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "exclude_modules": [],
    "dropout": 0.0, "dropout_position": "pre", "lora_A_init_method": "xavier", "lora_B_init_method": "zero",
    "a2a_experimental": False, "dtype": None, "adapter_path": None, "freeze_vision_model": True,
    "freeze_vision_projection": True, "freeze_language_model": True, "fully_sharded_loras": False,
}  # fmt: skip


def with_factors(model_path: str, layout: Layout, **lora: Any) -> Any:
    """An engine whose factors are random; ranks with the same part of one hold the same."""
    from megatron.core import parallel_state as mpu

    engine = build(model_path, layout, {**LORA, **lora})
    for number, chunk in enumerate(engine.module):
        for name, parameter in chunk.named_parameters():
            if ".adapter." in name:
                part = mpu.get_tensor_model_parallel_rank()
                if ".experts." in name:
                    part = (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_model_parallel_rank())
                place = f"{name} {part} {number} {mpu.get_pipeline_model_parallel_rank()}"
                generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
                parameter.data.normal_(std=0.2, generator=generator)
    engine.optimizer.reload_model_params()
    return engine
