# SPDX-License-Identifier: Apache-2.0
"""fp8 rollouts: what a sync leaves in SGLang's fp8 modules is what SGLang's own load makes of the whole checkpoint,
quantized by verl's formula. Blocks are small, for the models are tiny."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_fresh, run_world

from contract.families import FAMILIES, Family
from contract.fp8 import check_quantized, checkpoint, projections
from contract.fsdp_models import (
    LAYOUTS,
    Layout,
    Variant,
    build,
    change,
    deliver,
    fsdp1,
    merging_source,
    open_source,
    peft_model,
    shard,
)
from contract.reading import WAYS, State, planned
from contract.reading import deliver as deliver_plan
from contract.test_families import outcome
from megatron_cpu import stories
from megatron_cpu.engines import Layout as MegatronLayout
from verl_sync_plugin.trainers.base import WirePolicy

SIZE = 16
CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [SIZE, SIZE]}
ARGUMENTS = {"quantization": "fp8", "json_model_override_args": json.dumps({"quantization_config": CONFIG})}
LOADERS = (
    ".layers.parameter", ".layers.linear", ".vocab_parallel_embedding", ".fused_moe_triton.layer",
    ".quantization.unquant", ".quantization.fp8",
)  # fmt: skip
# Dense, experts, latent attention; those that verl's own quantizer gets wrong; and one whose scales SGLang drops
SOME = ("Qwen2", "Qwen3-MoE", "Mixtral", "Qwen2-MoE", "DeepSeek-V3", "Gemma", "Llama")


def load_as_on_a_gpu() -> None:
    """On a CPU SGLang pads what it loads, and packs fp8 weights for AMX."""
    import sglang.srt.layers.quantization.fp8  # noqa: F401

    for name, module in list(sys.modules.items()):
        ours = name.startswith("sglang.srt.") and (name.endswith(LOADERS) or ".models." in name)
        if ours and getattr(module, "_is_cpu", False):
            module._is_cpu = False  # type: ignore[attr-defined]


def whole_blocks(family: Family) -> Family:
    """The family with experts that two ranks share out in whole blocks, as SGLang insists."""
    sizes = {key: 64 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in family.config}
    return replace(family, config={**family.config, **sizes})


def in_fp8(policy: WirePolicy, saved: State) -> Iterator[tuple[str, torch.Tensor]]:
    return checkpoint(saved, policy.blocks)


def outcomes(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    load_as_on_a_gpu()
    found: dict[str, str] = {}
    for number, name in enumerate(names):
        try:
            family, place = whole_blocks(FAMILIES[name]), folder / str(number)
            found[name] = outcome(family, place, 0, ARGUMENTS, lambda policy: partial(in_fp8, policy))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2))
def test_an_engine_in_fp8_holds_what_its_own_load_makes_of_the_checkpoint(ranks: int, tmp_path: Path) -> None:
    found, *_ = run_fresh(ranks, outcomes, tmp_path, SOME, timeout=1000.0)
    assert "LlamaForCausalLM drops the scales of 14 weights that it keeps in fp8" in found.pop("Llama"), found
    assert found.pop("Gemma").startswith("exact, 5 of 34 tensors by the model's own path"), found
    assert set(found.values()) == {"exact, replayed"}, found


def shards_in_fp8(layout: Layout, model: str) -> None:
    module = shard(build(model), layout)
    for bucket_bytes, sharded in WAYS:
        plain = open_source(module, model)
        expected = deliver_plan(plain, *planned(plain, bucket_bytes))
        blocks = projections(expected, (SIZE, 8))
        check_quantized(plain, expected, blocks, bucket_bytes, sharded)
        change(module)


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], fsdp1(3), fsdp1(2, True)], ids=str)
def test_shards_are_quantized_as_the_whole_tensor_is(layout: Layout) -> None:
    """Rows of 60 and 85 elements, and shards that end anywhere in a block."""
    run_world(layout.size, shards_in_fp8, layout, "qwen2")


def test_experts_in_one_tensor_are_quantized_each_by_itself() -> None:
    run_world(2, shards_in_fp8, Layout((2,)), "qwen3_moe")


def merged_in_fp8(variant: Variant) -> None:
    module = shard(peft_model(variant), Layout((2,)))
    for bucket_bytes, sharded in WAYS:
        expected = deliver(merging_source(module, variant.model), bucket_bytes)
        source = merging_source(module, variant.model)
        check_quantized(source, expected, projections(expected, (SIZE, SIZE)), bucket_bytes, sharded)


def test_merged_adapters_are_quantized_after_the_merge() -> None:
    run_world(2, merged_in_fp8, Variant("all-linear", config={"target_modules": "all-linear"}))


@pytest.mark.usefixtures("bridge_processes")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen2", MegatronLayout(4, tp=2, pp=2)), ("qwen3-moe", MegatronLayout(2, tp=2, ep=2, etp=1))],
    ids=str,
)
def test_megatron_quantizes_parts_as_the_whole_tensor(kind: str, layout: MegatronLayout, request: Any) -> None:
    model = request.getfixturevalue("checkpoint")(kind)
    run_world(layout.world, stories.in_fp8, model, layout, timeout=180)
