# SPDX-License-Identifier: Apache-2.0
"""Plays the ranks that merge LoRA adapters of Megatron-Bridge, against the bridge's own merge and by hand."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from contract.reading import LARGE, TINY, State
from contract.sources import StandIn
from megatron_cpu.engines import Layout, build, stock_export, train_step
from megatron_cpu.stories import error_of, manager_of, one_sync, synced, syncs_offloaded, trained_steps
from verl_sync_plugin.trainers.base import take_over

LORA: dict[str, Any] = {
    "type": "lora", "rank": 8, "alpha": 16, "merge": True,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "exclude_modules": [],
    "dropout": 0.0, "dropout_position": "pre", "lora_A_init_method": "xavier", "lora_B_init_method": "zero",
    "a2a_experimental": False, "dtype": None, "adapter_path": None, "freeze_vision_model": True,
    "freeze_vision_projection": True, "freeze_language_model": True, "fully_sharded_loras": False,
}  # fmt: skip
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
    engine.optimizer.reload_model_params()
    return engine


def unmerged(engine: Any) -> State:
    exported = engine.bridge.export_hf_weights(
        engine.module, cpu=True, show_progress=False, merge_adapter_weights=False
    )
    return {name.replace(".base_layer", ""): tensor.clone() for name, tensor in exported}


def check_close(got: State, expected: State) -> None:
    """Both round once, from sums that are added in another order."""
    assert sorted(got) == sorted(expected)
    total = equal = 0
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.allclose(got[name], tensor, rtol=2**-7, atol=2**-12), name
        total, equal = total + tensor.numel(), equal + int((got[name] == tensor).sum())
    assert equal > 0.98 * total, f"{total - equal} of {total} elements are rounded otherwise"


def merged(model_path: str, layout: Layout, **lora: Any) -> list[str]:
    """Three syncs with two bucket sizes; returns names of what the adapters change."""
    engine = with_factors(model_path, layout, **lora)
    base = unmerged(engine)
    managers = [manager_of(engine, size, "bfloat16", how) for size, how in ((TINY, "staged"), (LARGE, "auto"))]
    changed: list[str] = []
    expected: State = {}
    for step in trained_steps(engine):
        before = expected
        for manager in managers:
            expected = synced(manager, check=check_close)
        changed = [name for name, tensor in expected.items() if not torch.equal(base[name], tensor)]
        assert not step or not any(torch.equal(before[name], expected[name]) for name in changed), "nothing was trained"
    return changed


def offloaded(model_path: str, layout: Layout) -> None:
    """So are factors."""
    syncs_offloaded(with_factors(model_path, layout), check_close)


def canonical(model_path: str, layout: Layout) -> None:
    """Adapters of another kind are merged by the bridge, whose stream is what arrives."""
    engine = with_factors(
        model_path, layout, type="canonical_lora", target_modules=["linear_q", "linear_k", "linear_v", "linear_proj"]
    )
    take_over(True)
    manager = manager_of(engine, TINY, "bfloat16")
    for _ in trained_steps(engine):
        synced(manager, "StreamSource", check_close)


def refused(model_path: str) -> str:
    engine = build(model_path, Layout(dist.get_world_size(), tp=2), {**LORA, "type": "dora"})
    return error_of(lambda: one_sync(manager_of(engine, LARGE)))[0]


def served(model_path: str, layout: Layout) -> None:
    """Three adapters in a row: with PEFT they make of the checkpoint what the bridge merges."""
    engine = with_factors(model_path, layout, merge=False)
    take_over(True)
    server = StandIn()  # every rank has one of its own
    manager = manager_of(engine, LARGE, "float32", server=server)
    manager._base_sent = True
    for version in (1, 2, 3):
        asyncio.run(manager.update_weights([], version))
        settings, factors = server.adapters[-1]
        assert settings["r"] == LORA["rank"] and "q_proj" in settings["target_modules"]
        check_close(merged_by_peft(model_path, settings, factors), stock_export(engine))
        train_step(engine)


def merged_by_peft(model_path: str, settings: dict[str, Any], factors: State) -> State:
    """The checkpoint with an adapter as SGLang is given it, merged by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(r=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"])
    adapted = get_peft_model(model, config)
    result = set_peft_model_state_dict(adapted, factors)
    assert not result.unexpected_keys, result.unexpected_keys
    plain = adapted.merge_and_unload()
    return {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}
