# SPDX-License-Identifier: Apache-2.0
"""Compares what a sync leaves in SGLang's fp8 modules with its own load of a checkpoint by verl's formula."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract.families import FAMILIES
from contract.fsdp_models import KEEP, LAYOUTS, Layout, build, change, fsdp1, manager_of, peft_model, shard
from contract.reading import LARGE, WAYS, State, check_quantized, in_fp8, projections, sync
from contract.sglang_models import build as build_engine
from contract.sglang_models import start, weights_of
from contract.sources import StandIn, Wanted, raised_alike
from contract.test_families import Named, found_by, in_turn, outcome, table, written
from contract.test_lora_syncs import LINEAR, WEIGHT, out_of_memory
from contract.wire import Wire
from pages import DOCS, check
from verl_sync_plugin.engine import introduce
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.trainers.base import WirePolicy

TABLE = DOCS / "fp8.md"
SIZE = 16
CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [SIZE, SIZE]}
ARGUMENTS = {"quantization": "fp8", "json_model_override_args": json.dumps({"quantization_config": CONFIG})}
LOADERS = (
    ".layers.parameter", ".layers.linear", ".vocab_parallel_embedding", ".fused_moe_triton.layer",
    ".quantization.unquant", ".quantization.fp8",
)  # fmt: skip
# Dense, experts, latent attention; those that verl's quantizer gets wrong; those whose scales are dropped or missing
SOME = ("Qwen2", "Qwen3-MoE", "Mixtral", "Qwen2-MoE", "DeepSeek-V3", "Gemma", "Llama", "Granite, MoE")


@on_ranks(2)
def test_a_broken_weight_is_named_and_a_rank_that_fails_leaves_nobody_alone() -> None:
    """Rank 1 has a NaN, or cannot read a weight; then it can, and all is as without a failure."""
    module, second = shard(build("qwen2"), Layout((2,))), dist.get_rank() == 1
    manager: Any = manager_of(module, StandIn(), delivery="staged")
    expected = sync(manager.open_source(), LARGE)
    blocks = projections(expected, (SIZE, SIZE))
    manager.trainer.policy.blocks.update(blocks)
    first = dict(module.named_parameters())[WEIGHT].to_local()[0, :1]  # type: ignore[attr-defined]
    held = first.detach().clone()
    with torch.no_grad():
        first.copy_(torch.nan if second else held)
    begun, way = manager.plan()
    way.fill(begun)
    said = pytest.raises(ValueError, match=f"parameter '{WEIGHT}' holds NaN or Inf in the trainer")
    with suppress(ValueError) if second else said:  # rank 0 has the scale
        way.check_finite()
    with torch.no_grad():
        first.copy_(held)
    begun, way = manager.plan()
    if second:
        shards = begun.source._found
        place = next(at for at, each in enumerate(shards) if each.base.views[0].name == WEIGHT)
        shards[place] = replace(shards[place], local=out_of_memory)
    text = raised_alike(SyncError, way.fill, begun)
    assert "rank 1: torch.OutOfMemoryError: injected" in text and text.count("rank ") == 1, text
    manager.sender.close()
    check_quantized(manager, expected, blocks, LARGE, False)


@on_ranks(2)
def test_a_tensor_of_which_the_engine_keeps_a_part_in_fp8_is_refused() -> None:
    manager = manager_of(shard(build("qwen3_moe"), Layout((2,))), StandIn())
    names = [name for name in sync(manager.open_source(), LARGE) if ".experts.0." in name]
    manager.trainer.policy.blocks[names[0]] = (SIZE, SIZE)
    with pytest.raises(ValueError, match=r"the engine has a part of it in fp8\. Remove "):
        manager.open_source().shards()


@pytest.mark.parametrize(
    ("layout", "model"),
    [*((layout, "qwen2") for layout in (*LAYOUTS[:3], fsdp1(3), fsdp1(2, True))), (Layout((2,)), "qwen3_moe")],
    ids=str,
)
@on_ranks("layout")
def test_shards_are_quantized_as_the_whole_tensor_is(layout: Layout, model: str) -> None:
    """Rows of 60 and 85 elements, and shards that end anywhere in a block; of experts in one tensor each by itself."""
    module = shard(build(model), layout)
    for bucket_bytes, sharded in WAYS:
        manager = manager_of(module, StandIn())
        manager.trainer.policy.kept = Wanted(*KEEP)
        expected = sync(manager.open_source(), bucket_bytes)
        check_quantized(manager, expected, projections(expected, (SIZE, 8)), bucket_bytes, sharded)
        change(module)


@on_ranks(2)
def test_merged_adapters_are_quantized_after_the_merge() -> None:
    module = shard(peft_model(LINEAR), Layout((2,)))
    for bucket_bytes, sharded in WAYS:
        manager = manager_of(module, StandIn())
        source = manager.open_source()
        expected = sync(source, bucket_bytes)
        with mock.patch.object(type(source), "_gather_bytes", 40_000):  # factors of a few buckets
            check_quantized(manager, expected, projections(expected, (SIZE, SIZE)), bucket_bytes, sharded)


def load_as_on_a_gpu() -> None:
    """On a CPU SGLang pads what it loads, and packs fp8 weights for AMX."""
    import sglang.srt.layers.quantization.fp8  # noqa: F401

    for name, module in list(sys.modules.items()):
        ours = name.startswith("sglang.srt.") and (name.endswith(LOADERS) or ".models." in name)
        if ours and getattr(module, "_is_cpu", False):
            module._is_cpu = False  # type: ignore[attr-defined]


def whole_blocks(config: dict[str, Any]) -> dict[str, Any]:
    """A family's config with experts that two ranks share out in whole blocks, as SGLang insists."""
    sizes = {key: 64 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in config}
    return {**config, **sizes, **{key: whole_blocks(value) for key, value in config.items() if key == "text_config"}}


def as_published(policy: WirePolicy, saved: State) -> Named:
    """A saved checkpoint as one in fp8 is published: experts by themselves."""
    for name, stacked in [(name, each) for name, each in saved.items() if ".experts." in name and each.dim() == 3]:
        projections = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
        prefix, parts = name.rpartition(".")[0], saved.pop(name).chunk(len(projections), -1)
        for number in range(len(stacked)):
            for projection, part in zip(projections, parts, strict=True):
                saved[f"{prefix}.{number}.{projection}.weight"] = part[number].T.contiguous()
    return in_fp8(saved, policy.blocks)


# By words of an outcome: what the table says in its place, without the numbers, which are the test's
SAID = {
    "cannot be synced": "as without fp8",
    "drops the scales of": "its load drops the scales",
    "into fp8 without a scale": "its experts are one tensor, which is not quantized",
    "could not load the weights": "its load cannot take fp8",
    "not divisible by weight quantization block": "its tiny layers are no whole blocks",
}


def outcomes(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    load_as_on_a_gpu()
    families = {name: replace(FAMILIES[name], config=whole_blocks(FAMILIES[name].config)) for name in names}
    cell = partial(outcome, arguments=ARGUMENTS, change=as_published)
    found = in_turn(folder, {name: partial(cell, family) for name, family in families.items()})
    return {
        name: next((f"refused: {said}" for words, said in SAID.items() if words in what), what)
        for name, what in found.items()
    }


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_in_fp8_holds_what_its_own_load_makes_of_the_checkpoint(ranks: int, tmp_path: Path) -> None:
    assert found_by((ranks,), SOME, tmp_path, outcomes)[ranks] == {name: written(TABLE)[ranks][name] for name in SOME}


@pytest.mark.extended
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.timeout(3600)
def test_every_family_in_fp8_is_what_the_table_says(tmp_path: Path) -> None:
    check(TABLE, "families", table(found_by((1, 2), tuple(FAMILIES), tmp_path, outcomes)))


@pytest.mark.usefixtures("fresh_processes")
@on_ranks(1, timeout=500)
@torch.no_grad()
def test_a_bit_that_flips_in_a_weight_or_a_scale_is_found(tmp_path: Path) -> None:
    """One bit in every parameter: of what travels all is compared, and the next sync is right."""
    load_as_on_a_gpu()
    model = build_engine(start(tmp_path, "qwen3-moe", **ARGUMENTS))
    whole = dict(weights_of("qwen3-moe", 0))
    with pytest.raises(SyncError, match=r"keeps .*_proj.weight in fp8, and this trainer does not quantize. Remove "):
        Wire(model).sync(list(whole.items()))
    blocks = projections(whole, (SIZE, SIZE))
    wire = Wire(model, verify="always")
    with mock.patch.object(introduce, "record", wraps=introduce.record) as dry_load:
        wire.sync(list(in_fp8(whole, blocks)))
    dry_load.assert_called_once()
    names = [name for name, each in model.named_parameters() if each.dtype.itemsize == 1 or "scale" in name]
    assert len(names) == 16, names
    for seed, name in enumerate(names):
        parameter = model.get_parameter(name)

        def flip(parameter: torch.Tensor = parameter) -> None:
            parameter.data.view(torch.uint8).view(-1)[-1] ^= 1

        sent = list(in_fp8(dict(weights_of("qwen3-moe", seed)), blocks))
        with pytest.raises(SyncError, match="the engine's parameters do not hold what was sent of "):
            wire.sync(sent, flip)
        wire.sync(sent)
    parameter = next(each for each in model.parameters() if each.dtype.itemsize == 1)
    parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(SyncError, match=r"in fp8 into bfloat16\. Remove "):
        wire.sync(sent)
