"""LoRA merged while streaming equals PEFT's own fp32 merge, and the trainer's base and adapters are never written."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_models import (
    BrokenOffError,
    Layout,
    Variant,
    deliver,
    merging_source,
    peft_model,
    rename,
    shard,
)
from models import build
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from test_fsdp_sources import torchs_own_state
from worlds import run_world

from verl_sync_plugin.lora.names import is_adapter
from verl_sync_plugin.lora.weights import lora_weights
from verl_sync_plugin.planner import plan_buckets
from verl_sync_plugin.source.naming import verl_rewrite

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


VARIANTS = [
    Variant("all-linear", config={"target_modules": "all-linear"}),
    Variant("regex", "llama", {"target_modules": r".*\.(q_proj|down_proj)$"}),
    Variant("rslora", "qwen3", {"target_modules": ALL, "use_rslora": True}),
    Variant("patterns", config={"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
    Variant("embedding-and-head", config={"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    Variant("modules-to-save", config={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    Variant("excluded", config={"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    Variant("dora", config={"target_modules": "all-linear", "use_dora": True}),
    Variant("dora-embedding", "llama", {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True}),
    Variant("lora-bias", config={"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    Variant("trained-bias", config={"target_modules": ["q_proj"], "bias": "lora_only"}),
    Variant(
        "experts",
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    Variant("router", "qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    Variant("tied-embedding", "qwen2_tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    Variant("tied-head", "qwen2_tied", {"target_modules": ["lm_head"]}),
    Variant("tied-both", "qwen2_tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    Variant("tied-saved-head", "qwen2_tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
]
# FSDP1 with use_orig_params=False refuses a unit of trainable and frozen parameters
MIXED = {
    "embedding-and-head", "modules-to-save", "dora-embedding", "trained-bias",
    "tied-embedding", "tied-head", "tied-both", "tied-saved-head",
}  # fmt: skip


def peft_merge(reference: PeftModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's own merge of the gathered weights, fp32, cast once. Tied weights are merged apart, not one twice."""
    model = copy.deepcopy(reference)
    model.load_state_dict(state)
    head = model.get_output_embeddings()
    if not isinstance(head, ModulesToSaveWrapper):
        head = getattr(head, "base_layer", head)
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    merged = model.merge_and_unload()
    parameters = {name for name, _ in merged.named_parameters()}
    cast = {name: t.bfloat16() if name in parameters else t for name, t in merged.state_dict().items()}
    return dict(verl_rewrite(model.config.model_type)(cast.items()))


def assert_within_one_ulp(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    if got.dtype != torch.bfloat16:
        assert torch.equal(got, expected), name
        return
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf, dtype=torch.bfloat16)) - expected.abs()
    # Where weight and delta cancel, the rounding of the fp32 product shows; it depends on how many rows are multiplied
    assert bool(((got - expected).abs() <= ulp.clamp(min=4e-6)).all()), f"{name}: {(got - expected).abs().max()}"


def merge_and_compare(variant: Variant, layout: Layout) -> None:
    reference = peft_model(variant)
    module = shard(peft_model(variant), layout)
    source = merging_source(module, variant.model)
    for bucket_bytes, sharded in ((9_001, False), (64 << 20, False), (9_001, True)):
        before = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
        expected = peft_merge(reference, before)
        got = deliver(source, bucket_bytes, sharded=sharded)
        assert sorted(got) == sorted(expected)
        for name, tensor in expected.items():
            assert_within_one_ulp(name, got[name], tensor)
        unmerged = dict(verl_rewrite(variant.model)(rename(before).items()))
        changed = [name for name in got if not torch.equal(got[name], unmerged[name].to(got[name].dtype))]
        assert changed, "nothing was merged"
        assert_unchanged(before, module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.25)


def cases() -> Iterator[tuple[Layout, Variant]]:
    """Every variant replicated, cut unevenly by three, and under every kind of sharding that takes it.

    Not every product: neighbours in the list take turns, one is cut by three under FSDP2, the next under FSDP1.
    """
    for number, variant in enumerate(VARIANTS):
        yield Layout((2, 2)), variant
        few, odd = (1 + number // 2 % 2,), number % 2
        yield Layout(few if odd else (3,)), variant
        yield Layout((3,) if odd else (2,), True), variant
        if variant.name not in MIXED:
            yield Layout((2,) if odd else (3,), False), variant


@pytest.mark.parametrize(("layout", "variant"), list(cases()), ids=lambda value: getattr(value, "name", str(value)))
def test_merge_equals_pefts(layout: Layout, variant: Variant) -> None:
    run_world(layout.size, merge_and_compare, variant, layout)


def test_cpu_offload_policy() -> None:
    """FSDP2 keeps shards in host memory for good; they are moved and merged piece by piece."""
    for variant in (VARIANTS[0], next(variant for variant in VARIANTS if variant.name == "dora-embedding")):
        run_world(2, merge_and_compare, variant, Layout((2,), offloaded=True))


def sync_often(layout: Layout, syncs: int) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == "dora-embedding")
    module = shard(peft_model(variant), layout)
    source = merging_source(module, variant.model)
    before = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
    first = deliver(source, 9_001)
    for _ in range(syncs - 1):
        again = deliver(source, 9_001)
    with pytest.raises(BrokenOffError):
        deliver(source, 9_001, break_off_after=7)
    assert_unchanged(before, module)
    again = deliver(source, 9_001)
    assert all(torch.equal(first[name], again[name]) for name in first), "a later sync shipped something else"
    assert_unchanged(before, module)


def count_collectives(layout: Layout, gather_bytes: int) -> tuple[list[int], list[int]]:
    """What each bucket's preparation yields before, and the bytes of factors that are there behind it."""
    source = merging_source(shard(peft_model(VARIANTS[0]), layout), VARIANTS[0].model, gather_bytes=gather_bytes)
    plan = plan_buckets(tuple(part.base for part in source.shards()), 30_001)
    bases = [bucket.bases for bucket in plan.buckets]
    counts, held = [], []
    for index, each in enumerate(bases):
        counts.append(sum(1 for _ in source.prepare(each, bases[index + 1 :])))
        assert {key for key, _ in source.merged_with(each)} <= source._gathered.keys()
        held.append(sum(factor.nbytes for factor in source._gathered.values()))
    source.release()
    assert not source._gathered
    return counts, held


@pytest.mark.parametrize("layout", [Layout((2,)), Layout((2, 2)), Layout((2,), True)], ids=str)
def test_the_factors_of_a_bucket_are_gathered_at_once(layout: Layout) -> None:
    for counts, _ in run_world(layout.size, count_collectives, layout, 0):
        assert len(counts) > 5 and max(counts) == 1 and sum(counts) > 1, counts


@pytest.mark.parametrize("layout", [Layout((3,)), Layout((2, 2))], ids=str)
def test_the_factors_of_several_buckets_are_gathered_at_once_within_bounds(layout: Layout) -> None:
    (alone, smallest), *_ = run_world(layout.size, count_collectives, layout, 0)
    bound = 2 * max(smallest)
    for counts, held in run_world(layout.size, count_collectives, layout, bound):
        assert max(counts) == 1 and 1 < sum(counts) <= sum(alone) * 2 // 3, (counts, alone)
        assert max(held) <= bound
    for counts, _ in run_world(layout.size, count_collectives, layout, 1 << 30):
        assert counts == [1] + [0] * (len(counts) - 1)


def change_between_syncs(layout: Layout) -> None:
    module = shard(peft_model(VARIANTS[0]), layout)
    source = merging_source(module, VARIANTS[0].model, gather_bytes=1 << 30)
    with pytest.raises(BrokenOffError):
        deliver(source, 30_001, break_off_after=2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                parameter.mul_(1.25)
    fresh = deliver(merging_source(module, VARIANTS[0].model), 30_001)
    for _ in range(2):
        got = deliver(source, 30_001)
        assert all(torch.equal(got[name], fresh[name]) for name in fresh), "factors of the sync before"


def test_what_was_gathered_ahead_of_a_failure_is_not_used_later() -> None:
    run_world(2, change_between_syncs, Layout((2,)))


def offload_between_syncs(layout: Layout, merge: bool) -> None:
    """verl replaces every parameter by a copy elsewhere when it offloads: the old one must be free to go."""
    module = shard(peft_model(VARIANTS[0]), layout)
    source = merging_source(module, "qwen2", merge)
    deliver(source, 64 << 20)
    source.release()
    held = [weakref.ref(parameter._local_tensor.untyped_storage()) for parameter in module.parameters()]  # type: ignore[attr-defined]
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    gc.collect()
    alive = sum(reference() is not None for reference in held)
    assert not alive, f"{alive} of {len(held)} parameters are still held after the sync"


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
def test_nothing_of_the_trainer_is_held_between_syncs(merge: bool) -> None:
    run_world(2, offload_between_syncs, Layout((2,)), merge)


def assert_unchanged(before: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    after = torchs_own_state(module)
    assert all(torch.equal(before[name], after[name]) for name in before), "the sync changed the trainer"


@pytest.mark.parametrize("layout", [Layout((2,)), Layout((2,), True)], ids=str)
def test_a_hundred_merges_and_a_failure_leave_the_trainer_bit_identical(layout: Layout) -> None:
    run_world(layout.size, sync_often, layout, 100)


@pytest.mark.parametrize(
    ("config", "model", "text"),
    [
        pytest.param(
            {"target_modules": ["q_proj"], "lora_bias": True}, "llama", "none in its base layer", id="lora-bias"
        ),
        pytest.param(
            {"target_modules": ["q_proj"], "alora_invocation_tokens": [1]}, "qwen2", "ALoraLinearVariant", id="alora"
        ),
        pytest.param(
            {"target_modules": ["q_proj"], "trainable_token_indices": [1]},
            "qwen2",
            "trainable_token_indices",
            id="tokens",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(config: dict[str, Any], model: str, text: str) -> None:
    adapted = get_peft_model(build(model), LoraConfig(r=3, **config))
    with pytest.raises(ValueError, match=text) as caught:
        lora_weights(adapted)
    assert "LoRA module 'base_model" in str(caught.value)


def test_two_active_adapters_are_refused_by_name() -> None:
    adapted = get_peft_model(build("qwen2"), LoraConfig(r=3, target_modules=["q_proj"]))
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="several active adapters"):
        lora_weights(adapted)


def test_a_loaded_adapter_brings_its_own_settings(tmp_path: Path) -> None:
    """verl's ``lora_adapter_path``: rsLoRA, DoRA, patterns and a saved module."""
    settings = {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]}
    saved = peft_model(Variant("saved", config={"target_modules": ["q_proj", "down_proj"], **settings}))
    saved.save_pretrained(str(tmp_path))
    run_world(2, load_and_merge, str(tmp_path))


def load_and_merge(path: str) -> None:
    """Through the engine's own step."""
    from verl_sync_plugin.hooks.engine import SyncFSDPEngineWithLMHead

    engine: Any = object.__new__(SyncFSDPEngineWithLMHead)
    engine.model_config = SimpleNamespace(lora_adapter_path=path, use_shm=False, lora={}, lora_rank=3)
    reference = engine._build_lora_module(build("qwen2"))
    adapter = {name for name in reference.state_dict() if is_adapter(name) or "modules_to_save" in name}
    assert len(adapter) == 2 * 2 * 3 + 1
    expected = peft_merge(reference, reference.state_dict())
    module = shard(engine._build_lora_module(build("qwen2")), Layout((2,)))
    got = deliver(merging_source(module, "qwen2"), 9_001)
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert_within_one_ulp(name, got[name], tensor)
    plain = {name: tensor.bfloat16() for name, tensor in build("qwen2").state_dict().items()}
    assert not torch.equal(got["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"])
