"""LoRA merged while streaming equals PEFT's own fp32 merge, and the trainer's base and adapters are never written."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build
from peft import LoraConfig, PeftModel, get_peft_model
from test_fsdp_sources import torchs_own_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from worlds import run_world

from verl_sync_plugin.bucket import plan_buckets
from verl_sync_plugin.lora import lora_weights
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.source.base import ParameterSource, WirePolicy
from verl_sync_plugin.source.fsdp1 import FSDP1Source
from verl_sync_plugin.source.fsdp2 import FSDP2Source
from verl_sync_plugin.source.lora import ADAPTER_PATTERN, MergingSource, merged_name
from verl_sync_plugin.source.naming import verl_rewrite
from verl_sync_plugin.transport.sender import BucketSender

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """What users configure: keyword arguments of PEFT's ``LoraConfig``."""

    name: str
    model: str = "qwen2"
    config: dict[str, Any] = field(default_factory=dict)


VARIANTS = [
    Variant("all-linear", config={"target_modules": "all-linear"}),
    Variant("regex", "llama", {"target_modules": r".*\.(q_proj|down_proj)$"}),
    Variant("rslora", "qwen3", {"target_modules": ALL, "use_rslora": True}),
    Variant("patterns", config={"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}),
    Variant("embedding-and-head", config={"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    Variant("modules-to-save", config={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    Variant("excluded", config={"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
]


def peft_model(variant: Variant) -> PeftModel:
    """The adapted model with random adapters, the same on every rank."""
    model = get_peft_model(build(variant.model), LoraConfig(r=3, lora_alpha=7, **variant.config))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def shard(model: PeftModel, mesh_shape: tuple[int, ...], fsdp1: bool) -> torch.nn.Module:
    """Wraps like verl wraps a PEFT model."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    if not fsdp1:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    policy = get_fsdp_wrap_policy(model, None, is_lora=True)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh, device_id=CPU)


def rename(state: dict[str, Any]) -> dict[str, Any]:
    return {hf: value for name, value in state.items() if (hf := merged_name(name)) is not None}


def merging_source(module: torch.nn.Module, model_type: str) -> ParameterSource:
    policy, rewrite = WirePolicy(torch.bfloat16, (ADAPTER_PATTERN,)), verl_rewrite(model_type)
    inner: ParameterSource
    if isinstance(module, FullyShardedDataParallel):
        inner = FSDP1Source(module, policy, rewrite, rename)
    else:
        parameters = set(rename(dict(module.named_parameters(remove_duplicate=False))))
        inner = FSDP2Source(lambda: rename(module.state_dict()), parameters, policy, rewrite)
    model = getattr(module, "_fsdp_wrapped_module", module)
    weights = [replace(weight, name=merged_name(weight.name) or "") for weight in lora_weights(model)]
    return MergingSource(inner, weights, CPU)


def deliver(source: ParameterSource, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """One sync, as the manager runs it."""
    shards = source.shards()
    plan = plan_buckets(tuple(part.base for part in shards), bucket_bytes)
    sender, assembler = BucketSender(CPU, 30.0), Assembler()
    sender.reserve(plan)
    rank = 0 if source.group is None else dist.get_rank(source.group)
    got = {}
    for bucket in plan.buckets:
        source.prepare(tuple(dict.fromkeys(part.base for part in bucket.slices)))
        sender.pack(bucket, 0, shards, rank if bucket.world > 1 else 0)
        sender.gather(bucket, 0, rank, source.group)
        got.update({name: t.clone() for name, t in assembler.tensors(sender._slot(0), bucket.entries)})
    assembler.finish()
    sender.close()
    return got


def peft_merge(reference: PeftModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's own merge of the gathered weights, fp32, cast once."""
    model = copy.deepcopy(reference)
    model.load_state_dict(state)
    merged = model.merge_and_unload()
    parameters = {name for name, _ in merged.named_parameters()}
    return {name: t.bfloat16() if name in parameters else t for name, t in merged.state_dict().items()}


def assert_within_one_ulp(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    if got.dtype != torch.bfloat16:
        assert torch.equal(got, expected), name
        return
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf, dtype=torch.bfloat16)) - expected.abs()
    assert bool(((got - expected).abs() <= ulp).all()), f"{name}: {(got - expected).abs().max()}"


def merge_and_compare(variant: Variant, mesh_shape: tuple[int, ...], fsdp1: bool) -> None:
    reference = peft_model(variant)
    module = shard(peft_model(variant), mesh_shape, fsdp1)
    source = merging_source(module, variant.model)
    for bucket_bytes in (9_001, 64 << 20, 9_001):
        before = {name: tensor.clone() for name, tensor in torchs_own_state(module).items()}
        expected = peft_merge(reference, before)
        got = deliver(source, bucket_bytes)
        assert sorted(got) == sorted(expected)
        for name, tensor in expected.items():
            assert_within_one_ulp(name, got[name], tensor)
        unmerged = rename(before)
        changed = [name for name in got if not torch.equal(got[name], unmerged[name].to(got[name].dtype))]
        assert changed, "nothing was merged"
        after = torchs_own_state(module)
        assert all(torch.equal(before[name], after[name]) for name in before), "the sync changed the trainer"
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.25)


LAYOUTS = [((1,), False), ((2,), False), ((3,), False), ((2, 2), False), ((2,), True), ((3,), True)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{'fsdp1' if layout[1] else 'fsdp2'}-{layout[0]}")
def test_merge_equals_pefts(variant: Variant, layout: tuple[tuple[int, ...], bool]) -> None:
    mesh_shape, fsdp1 = layout
    if fsdp1 and variant.name in ("embedding-and-head", "modules-to-save"):
        pytest.skip("FSDP1 itself refuses a unit of trainable and frozen parameters")
    size = int(torch.tensor(mesh_shape).prod())
    run_world(size, partial(merge_and_compare, variant, mesh_shape, fsdp1))


@pytest.mark.parametrize(
    ("config", "model", "text"),
    [
        pytest.param({"target_modules": ["q_proj"], "use_dora": True}, "qwen2", "uses DoRA", id="dora"),
        pytest.param(
            {"target_modules": ["q_proj"], "lora_bias": True}, "qwen2", "bias in its B factor", id="lora-bias"
        ),
        pytest.param(
            {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
            "qwen3_moe",
            "ParamWrapper",
            id="target-parameters",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(config: dict[str, Any], model: str, text: str) -> None:
    adapted = get_peft_model(build(model), LoraConfig(r=3, **config))
    with pytest.raises(ValueError, match=text) as caught:
        lora_weights(adapted)
    assert "LoRA module 'base_model" in str(caught.value)


def test_tied_weights_cannot_be_adapted() -> None:
    model = peft_model(Variant("tied", "qwen2_tied", {"target_modules": ["embed_tokens"]}))
    with pytest.raises(ValueError, match=r"tied to 'lm_head.weight'"):
        run_in_one(model)


def run_in_one(model: PeftModel) -> None:
    """The sources need no process group for a world of one."""
    parameters = set(rename(dict(model.named_parameters(remove_duplicate=False))))
    policy = WirePolicy(torch.bfloat16, (ADAPTER_PATTERN,))
    inner = FSDP2Source(lambda: rename(model.state_dict()), parameters, policy, verl_rewrite("qwen2"))
    weights = [replace(weight, name=merged_name(weight.name) or "") for weight in lora_weights(model)]
    MergingSource(inner, weights, CPU).shards()
