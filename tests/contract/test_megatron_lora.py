# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of Megatron-Bridge: merged on local parts, with the values of the bridge's own merge; or served."""

import asyncio
import zlib
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM
from worlds import on_ranks

from contract.reading import State
from contract.sources import StandIn, manager_of
from contract.test_megatron import check_exports, check_offloaded, converting, error_of, reader_of
from hydra_run import CONFIG_DIR
from megatron_cpu.engines import Layout, build, stock_export, train_step
from verl_sync_plugin.trainers.base import export_shards

pytestmark = pytest.mark.usefixtures("bridge_processes")

VERLS: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "model" / "hf_model.yaml").lora)
LORA = {**VERLS, "rank": 8, "alpha": 16, "merge": True}


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


LATENT = ["linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]


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


@pytest.mark.parametrize(("kind", "layout", "lora"), [
    ("qwen2", Layout(4, tp=2, pp=2), {}),
    ("qwen3-moe", Layout(2, ep=2), {}),
    pytest.param("qwen3-moe", Layout(2, ep=2), OWN, id="an adapter for each expert"),
    pytest.param("moonlight", Layout(2, tp=2, ep=2, etp=1), {"target_modules": LATENT}, id="latent attention"),
    pytest.param("qwen2", Layout(2, tp=2), {}, marks=MORE),
    pytest.param("qwen3", Layout(2, pp=2), {}, marks=MORE),
    pytest.param("qwen3-moe", Layout(4, tp=2, pp=2, ep=2, etp=1), {}, marks=MORE),
    pytest.param("qwen2-tied", Layout(2, tp=2), {}, marks=MORE),
], ids=str)  # fmt: skip
@on_ranks("layout", timeout=180)
def test_merged_weights_are_the_bridges(checkpoint: str, kind: str, layout: Layout, lora: dict[str, Any]) -> None:
    engine = with_factors(checkpoint, layout, **lora)
    before = stock_export(engine)
    bases = engine.bridge.export_hf_weights(engine.module, cpu=True, show_progress=False, merge_adapter_weights=False)
    base = {name.replace(".base_layer", ""): tensor.clone() for name, tensor in bases}
    changed = [name for name, tensor in before.items() if not torch.equal(base[name], tensor)]
    check_exports(engine, same=check_close)
    after = stock_export(engine)
    assert not any(torch.equal(before[name], after[name]) for name in changed), "nothing was trained"
    if kind == "moonlight":
        kinds = {name.split(".")[-2] for name in changed}
        assert kinds >= {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}, kinds
    else:
        assert len(changed) == 4 * (4 + (3 * 4 if "moe" in kind else 3)), "every projection of every layer is adapted"


@pytest.mark.parametrize(
    ("kind", "layout", "lora"), [("qwen2", Layout(2, tp=2), {}), ("qwen3-moe", Layout(2, ep=2), OWN)]
)
@on_ranks("layout", timeout=180)
def test_offloaded_factors_are_read_where_they_are(checkpoint: str, kind: str, layout: Layout, lora: Any) -> None:
    check_offloaded(with_factors(checkpoint, layout, **lora), check_close)


@on_ranks(2)
def test_adapters_of_another_kind_are_merged_by_the_bridge(checkpoint: str, layout: Layout) -> None:
    """Its stream is what arrives."""
    engine = with_factors(
        checkpoint, layout, type="canonical_lora", target_modules=["linear_q", "linear_k", "linear_v", "linear_proj"]
    )
    export_shards(True)
    check_exports(engine, "StreamSource", check_close)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3-moe", Layout(2, tp=2, etp=2))], ids=str)
@on_ranks("layout")
def test_what_the_bridge_merges_wrongly_is_refused(checkpoint: str, layout: Layout) -> None:
    """Factors of experts that are split, and weights whose conversion computes; where its stream has to be taken."""
    reader_of(with_factors(checkpoint, layout)).sync()
    for mapping, words in (("ReplicatedMapping", "experts"), ("QKVMapping", ".linear_qkv.to_wrap.weight'")):
        with converting(mapping, lambda stock: {name: tensor + 1 for name, tensor in stock().items()}):
            text = error_of(reader_of(with_factors(checkpoint, layout)).sync)
            assert "Megatron-Bridge merges it wrongly" in text and words in text, text


@on_ranks(2)
def test_dora_is_refused_by_name(checkpoint: str, layout: Layout) -> None:
    text = error_of(lambda: reader_of(build(checkpoint, layout, {**LORA, "type": "dora"})).sync())
    assert "model.lora.type='dora' with actor_rollout_ref.actor.strategy=megatron" in text


def merged_by_peft(model_path: str, settings: dict[str, Any], factors: State) -> State:
    """The checkpoint with an adapter as SGLang is given it, merged by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(r=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"])
    adapted = get_peft_model(model, config)
    result = set_peft_model_state_dict(adapted, factors)
    assert not result.unexpected_keys, result.unexpected_keys
    return {name: tensor.bfloat16() for name, tensor in adapted.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize("layout", [Layout(2, tp=2), pytest.param(Layout(2, pp=2), marks=MORE)], ids=str)
@on_ranks("layout", timeout=180)
def test_served_adapters_make_what_the_bridge_merges(checkpoint: str, layout: Layout) -> None:
    """Three adapters in a row, merged into the checkpoint by PEFT."""
    engine = with_factors(checkpoint, layout, merge=False)
    export_shards(True)
    server = StandIn()  # every rank has one of its own
    manager = manager_of("megatron", engine, server, wire="float32")
    manager._base_sent = True
    for version in (1, 2, 3):
        asyncio.run(manager.update_weights([], version))
        settings, factors = server.adapters[-1]
        assert settings["r"] == LORA["rank"] and "q_proj" in settings["target_modules"]
        check_close(merged_by_peft(checkpoint, settings, factors), stock_export(engine))
        train_step(engine)
