# SPDX-License-Identifier: Apache-2.0
"""What the ranks do with LoRA adapters of Megatron-Bridge: merged, against the bridge's own merge and by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_cpu.engines import Layout, build, stock_export, train_step
from megatron_cpu.stories import LARGE, TINY, State, manager_of, one_sync
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.trainers.megatron.lora import MegatronLoRASource

LORA: dict[str, Any] = {
    "type": "lora",
    "rank": 8,
    "alpha": 16,
    "merge": True,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
    "dropout": 0.0,
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "dtype": None,
    "adapter_path": None,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
    "freeze_language_model": True,
    "fully_sharded_loras": False,
}
LATENT = ["linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]


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
    for group in (engine.optimizer,):
        group.reload_model_params()
    return engine


def check_close(got: State, expected: State) -> None:
    """Both round once, from sums that are added in another order."""
    assert sorted(got) == sorted(expected)
    total = equal = 0
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        torch.testing.assert_close(got[name], tensor, rtol=2**-7, atol=2**-12, msg=lambda text, name=name: f"{name}: {text}")
        total, equal = total + tensor.numel(), equal + int((got[name] == tensor).sum())
    assert equal > 0.98 * total, f"{total - equal} of {total} elements are rounded otherwise"


def merged(model_path: str, layout: Layout, targets: list[str] | None = None) -> list[str]:
    """Three syncs with three bucket sizes; returns names of what the adapters change."""
    engine = with_factors(model_path, layout, **({"target_modules": targets} if targets else {}))
    base = {name: t.clone() for name, t in engine.bridge.export_hf_weights(engine.module, cpu=True, merge_adapter_weights=False, show_progress=False)}
    managers = [manager_of(engine, size, "bfloat16", how) for size, how in ((TINY, "gathered"), (LARGE, "auto"))]
    changed: list[str] = []
    for step in range(3):
        if step:
            train_step(engine)
        before, expected = expected if step else {}, stock_export(engine)
        for manager in managers:
            check_close(one_sync(manager), expected)
            assert isinstance(manager.source, MegatronLoRASource), "the bridge's own stream was used"
        stripped = {name.replace(".base_layer", ""): tensor for name, tensor in base.items()}
        changed = [name for name, tensor in expected.items() if not torch.equal(stripped[name], tensor)]
        assert all(not torch.equal(before[name], expected[name]) for name in changed if step), "training changed nothing"
    return changed


def failing(model_path: str, layout: Layout) -> str:
    """The last rank fails while it prepares factors: everyone's error; then all is well."""
    engine = with_factors(model_path, layout)
    manager = manager_of(engine, TINY, "bfloat16")
    check_close(one_sync(manager), stock_export(engine))
    source = manager.source
    assert isinstance(source, MegatronLoRASource)
    text, stock = "", source.factors.gather

    def fail(*args: Any) -> Any:
        raise RuntimeError("injected into the gathering")

    if dist.get_rank() == dist.get_world_size() - 1:
        source.factors.gather = fail  # type: ignore[method-assign]
    try:
        one_sync(manager)
    except SyncError as error:
        text = str(error)
    source.factors.gather = stock  # type: ignore[method-assign]
    train_step(engine)
    check_close(one_sync(manager), stock_export(engine))
    return text


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except SyncError as error:
        return str(error)
    return ""


def refused(model_path: str) -> str:
    """DoRA of Megatron-Bridge."""
    engine = build(model_path, Layout(dist.get_world_size(), tp=2), {**LORA, "type": "dora"})
    return error_of(lambda: one_sync(manager_of(engine, LARGE)))
