# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of Megatron-Bridge: merged on local parts, with the values of the bridge's own merge; or served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM
from worlds import on_ranks

from contract.reading import LARGE, TINY, State
from contract.sources import StandIn
from contract.test_megatron import error_of, manager_of, one_sync, synced, syncs_offloaded, trained_steps
from megatron_cpu.engines import Layout, build, stock_export, train_step
from megatron_cpu.lora import LORA, with_factors
from verl_sync_plugin.trainers.base import take_over

pytestmark = pytest.mark.usefixtures("bridge_processes")


LATENT = ["linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]


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


OWN, MORE = {"share_expert_adapters": False}, pytest.mark.extended


@pytest.mark.parametrize(
    ("kind", "layout", "lora"),
    [
        ("qwen2", Layout(4, tp=2, pp=2), {}),
        ("qwen3-moe", Layout(2, ep=2), {}),
        pytest.param("qwen3-moe", Layout(2, ep=2), OWN, id="an adapter for each expert"),
        pytest.param("moonlight", Layout(2, tp=2, ep=2, etp=1), {"target_modules": LATENT}, id="latent attention"),
        pytest.param("qwen2", Layout(2, tp=2), {}, marks=MORE),
        pytest.param("qwen3", Layout(2, pp=2), {}, marks=MORE),
        pytest.param("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1), {}, marks=MORE),
        pytest.param("qwen2-tied", Layout(2, tp=2), {}, marks=MORE),
    ],
    ids=str,
)
@on_ranks("layout", timeout=180)
def test_merged_weights_are_those_of_the_bridge(
    checkpoint: str, kind: str, layout: Layout, lora: dict[str, Any]
) -> None:
    """Three syncs with two bucket sizes."""
    engine = with_factors(checkpoint, layout, **lora)
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
    if kind == "moonlight":
        kinds = {name.split(".")[-2] for name in changed}
        assert kinds >= {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}, kinds
    else:
        assert len(changed) == 4 * (4 + (3 * 4 if "moe" in kind else 3)), "every projection of every layer is adapted"


@on_ranks(2)
def test_offloaded_factors_are_read_where_they_are(checkpoint: str, layout: Layout) -> None:
    syncs_offloaded(with_factors(checkpoint, layout), check_close)


@on_ranks(2)
def test_adapters_of_another_kind_are_merged_by_the_bridge(checkpoint: str, layout: Layout) -> None:
    """Its stream is what arrives."""
    engine = with_factors(
        checkpoint, layout, type="canonical_lora", target_modules=["linear_q", "linear_k", "linear_v", "linear_proj"]
    )
    take_over(True)
    manager = manager_of(engine, TINY, "bfloat16")
    for _ in trained_steps(engine):
        synced(manager, "StreamSource", check_close)


@on_ranks(2)
def test_dora_is_refused_by_name(checkpoint: str, layout: Layout) -> None:
    manager = manager_of(build(checkpoint, layout, {**LORA, "type": "dora"}), LARGE)
    text = error_of(lambda: one_sync(manager))
    assert "model.lora.type='dora' with actor_rollout_ref.actor.strategy=megatron" in text


def merged_by_peft(model_path: str, settings: dict[str, Any], factors: State) -> State:
    """The checkpoint with an adapter as SGLang is given it, merged by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(r=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"])
    adapted = get_peft_model(model, config)
    result = set_peft_model_state_dict(adapted, factors)
    assert not result.unexpected_keys, result.unexpected_keys
    plain = adapted.merge_and_unload()
    return {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}


@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2), pytest.param(Layout(2, pp=2), marks=pytest.mark.extended)], ids=str
)
@on_ranks("layout", timeout=180)
def test_served_adapters_make_what_the_bridge_merges(checkpoint: str, layout: Layout) -> None:
    """Three adapters in a row, merged into the checkpoint by PEFT."""
    engine = with_factors(checkpoint, layout, merge=False)
    take_over(True)
    server = StandIn()  # every rank has one of its own
    manager = manager_of(engine, LARGE, "float32", server=server)
    manager._base_sent = True
    for version in (1, 2, 3):
        asyncio.run(manager.update_weights([], version))
        settings, factors = server.adapters[-1]
        assert settings["r"] == LORA["rank"] and "q_proj" in settings["target_modules"]
        check_close(merged_by_peft(checkpoint, settings, factors), stock_export(engine))
        train_step(engine)
