# SPDX-License-Identifier: Apache-2.0
"""LoRA on Megatron through verl's default bridge: merged on local parts, with the values of the bridge's own merge."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from worlds import run_world

from megatron_cpu import lora
from megatron_cpu.engines import Layout

pytestmark = pytest.mark.usefixtures("bridge_processes")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen2", Layout(4, tp=2, pp=2)),
        pytest.param("qwen2", Layout(2, tp=2), marks=pytest.mark.extended),
        pytest.param("qwen3", Layout(2, pp=2), marks=pytest.mark.extended),
        ("qwen3-moe", Layout(2, ep=2)),
        pytest.param("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1), marks=pytest.mark.extended),
        pytest.param("qwen2-tied", Layout(2, tp=2), marks=pytest.mark.extended),
    ],
    ids=lambda value: str(value),
)
def test_merged_weights_are_those_of_the_bridge(kind: str, layout: Layout, checkpoint: Callable[[str], str]) -> None:
    changed, *_ = run_world(layout.world, lora.merged, checkpoint(kind), layout, timeout=180)
    assert len(changed) == 4 * (4 + (3 * 4 if "moe" in kind else 3)), "every projection of every layer is adapted"


def test_each_expert_may_have_an_adapter_of_its_own(checkpoint: Callable[[str], str]) -> None:
    work = partial(lora.merged, share_expert_adapters=False)
    changed, *_ = run_world(2, work, checkpoint("qwen3-moe"), Layout(2, ep=2), timeout=180)
    assert sum(".experts." in name for name in changed) == 4 * 3 * 4


@pytest.mark.parametrize("layout", [Layout(2, tp=2, ep=2, etp=1)], ids=str)
def test_latent_attention_and_shared_experts_are_merged(layout: Layout, checkpoint: Callable[[str], str]) -> None:
    work = partial(lora.merged, target_modules=lora.LATENT)
    changed, *_ = run_world(2, work, checkpoint("moonlight"), layout, timeout=180)
    assert {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= {name.split(".")[-2] for name in changed}


@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2), pytest.param(Layout(2, pp=2), marks=pytest.mark.extended)], ids=str
)
def test_served_adapters_make_what_the_bridge_merges(layout: Layout, checkpoint: Callable[[str], str]) -> None:
    run_world(2, lora.served, checkpoint("qwen2"), layout, timeout=180)


def test_offloaded_factors_are_read_where_they_are(checkpoint: Callable[[str], str]) -> None:
    run_world(2, lora.offloaded, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)


def test_adapters_of_another_kind_are_merged_by_the_bridge(checkpoint: Callable[[str], str]) -> None:
    run_world(2, lora.canonical, checkpoint("qwen2"), Layout(2, tp=2), timeout=120)


def test_dora_is_refused_by_name(checkpoint: Callable[[str], str]) -> None:
    first, second = run_world(2, lora.refused, checkpoint("qwen2"), timeout=120)
    assert first == second and "model.lora.type='dora' with actor_rollout_ref.actor.strategy=megatron" in first
