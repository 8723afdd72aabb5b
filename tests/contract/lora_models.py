# SPDX-License-Identifier: Apache-2.0
"""PEFT models, sharded as verl shards them, and one sync of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from models import build
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard

from contract.fsdp_layouts import torchs_own_state
from contract.reading import Reader
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.lora.peft import InUse, copies_in_use, lora_weights, merged_name, renamed_weights
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.trainers.base import WirePolicy
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.lora import MergingSource
from verl_sync_plugin.trainers.naming import verl_rewrite

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """What users configure: keyword arguments of PEFT's ``LoraConfig``."""

    name: str
    model: str = "qwen2"
    config: dict[str, Any] = field(default_factory=dict)


class BrokenOffError(Exception):
    """The failure in the middle of a sync."""


def peft_model(variant: Variant) -> PeftModel:
    """The adapted model with random adapters, the same on every rank."""
    model = get_peft_model(build(variant.model), LoraConfig(r=3, lora_alpha=7, **variant.config))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.endswith("q_proj.base_layer.bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True)
class Layout:
    """How verl is told to shard: FSDP2, or FSDP1 with ``use_orig_params``."""

    mesh: tuple[int, ...]
    original: bool | None = None
    offloaded: bool = False  # FSDP2's CPUOffloadPolicy

    def __str__(self) -> str:
        kind = {None: "fsdp2", True: "fsdp1-original", False: "fsdp1"}[self.original]
        return f"{kind}-{'x'.join(map(str, self.mesh))}{'-offloaded' * self.offloaded}"

    @property
    def size(self) -> int:
        return math.prod(self.mesh)


def shard(model: PeftModel, layout: Layout) -> torch.nn.Module:
    """Wraps like verl wraps a PEFT model."""
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=("replicas", "shards")[-len(layout.mesh) :])
    if layout.original is None:
        policy = CPUOffloadPolicy(pin_memory=False) if layout.offloaded else OffloadPolicy()
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        return fully_shard(model, mesh=mesh, offload_policy=policy)
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    policy = get_fsdp_wrap_policy(model, None, is_lora=True)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_mesh=mesh, device_id=CPU, use_orig_params=layout.original
    )


def rename(state: dict[str, Any], in_use: dict[str, str | None] | None = None) -> dict[str, Any]:
    return {hf: value for name, value in state.items() if (hf := merged_name(name, in_use or {})) is not None}


def merging_source(
    module: torch.nn.Module,
    model_type: str,
    merge: bool = True,
    gather_bytes: int = 40_000,
    timeout_seconds: float = 30.0,
) -> MergingSource:
    """As the manager opens it; so small that the factors of a few buckets are gathered at a time."""
    policy, rewrite = WirePolicy(torch.bfloat16), verl_rewrite(model_type)
    model = getattr(module, "_fsdp_wrapped_module", module)
    renaming = partial(rename, in_use=copies_in_use(model))
    inner: FSDP1Source | FSDP2Source
    if isinstance(module, FullyShardedDataParallel):
        inner = FSDP1Source(module, policy, rewrite, renaming)
    else:
        inner = FSDP2Source(module, policy, rewrite, renaming)
    weights = renamed_weights(lora_weights(model), renaming)
    return MergingSource(inner, weights, CPU, merge, gather_bytes, InUse(model).check, timeout_seconds)


def deliver(
    source: MergingSource, bucket_bytes: int, break_off_after: int | None = None, sharded: bool = False
) -> dict[str, torch.Tensor]:
    """One sync, as the manager runs it; breaks off after some buckets when told to."""
    shards = source.shards()
    plan = plan_buckets(tuple(part.base for part in shards), bucket_bytes, sharded)
    reader, assembler = Reader(plan, source, BucketSender(CPU, 30.0)), Assembler()
    got = {}
    for index, bucket in enumerate(plan.buckets):
        if index == break_off_after:
            raise BrokenOffError
        for _ in source.prepare(bucket.bases, [later.bases for later in plan.buckets[index + 1 :]]):
            pass
        memory = reader.receive(index, shards)
        got.update({name: t.clone() for name, t in assembler.tensors(memory, bucket.entries)})
    assembler.finish()
    reader.close()
    return got


def assert_unchanged(before: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    after = torchs_own_state(module)
    assert all(torch.equal(before[name], after[name]) for name in before), "the sync changed the trainer"
