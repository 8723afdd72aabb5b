# SPDX-License-Identifier: Apache-2.0
"""Tiny HF models, with LoRA or without, sharded by FSDP and FSDP2 the way verl does, and the sources over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from contract.reading import CPU, TINY, State, planned
from contract.reading import deliver as deliver_plan
from contract.sources import Wanted, reader_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.lora.peft import Adapters, merged_name
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, WirePolicy
from verl_sync_plugin.trainers.lora import MergingSource
from verl_sync_plugin.trainers.naming import Naming, verl_rewrite

KEEP = (r"\.gate\.weight$", r"layers\.0\.input_layernorm")
# Odd, so that shards are uneven and some ranks hold nothing of a parameter
VOCABULARY = 323
SIZES = {
    "hidden_size": 60, "intermediate_size": 85, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 10,
}  # fmt: skip
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 21}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
}


def build(name: str) -> PreTrainedModel:
    """The model in fp32, the same on every rank, with persistent buffers of three kinds."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data.normal_()  # also norms and biases, which start as ones and zeros
    model.model.layers[0].mlp.register_buffer("e_score_correction_bias", torch.randn(5))
    model.model.layers[1].register_buffer("count", torch.tensor(3))
    model.register_buffer("scratch", torch.randn(4), persistent=False)
    assert isinstance(model, PreTrainedModel)
    return model


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A real forward, backward and update; weight decay moves every parameter. Buffers change too."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for _, buffer in model.named_buffers():
        if buffer.numel() in (1, 5):
            buffer.add_(1)


@dataclass(frozen=True)
class Layout:
    """How the trainer shards: FSDP2 without a strategy."""

    mesh: tuple[int, ...]
    strategy: str = ""
    use_orig_params: bool = False
    offloaded: bool = False  # FSDP2's CPUOffloadPolicy

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        name = f"fsdp1-{self.strategy}-{'orig' if self.use_orig_params else 'flat'}" if self.strategy else "fsdp2"
        return f"{name}-{'x'.join(map(str, self.mesh))}{'-offloaded' * self.offloaded}"


def fsdp1(world: int, use_orig_params: bool = False, strategy: str = "FULL_SHARD") -> Layout:
    return Layout((world,), strategy, use_orig_params)


LAYOUTS = [Layout(mesh) for mesh in ((1,), (2,), (3,), (2, 2))] + [
    Layout(mesh, strategy, use_orig_params)
    for use_orig_params in (True, False)
    for mesh, strategy in (
        *(((world,), "FULL_SHARD") for world in (1, 2, 3)),
        *(((3,), "SHARD_GRAD_OP"), ((2, 2), "HYBRID_SHARD"), ((2,), "NO_SHARD")),
    )
]


def shard(model: PreTrainedModel | PeftModel, layout: Layout) -> torch.nn.Module:
    """Wraps like verl: one unit per decoder layer and the root; FSDP1 more of a PEFT model."""
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=("replicas", "shards")[-len(layout.mesh) :])
    adapted = isinstance(model, PeftModel)
    if not layout.strategy:
        policy = CPUOffloadPolicy(pin_memory=False) if layout.offloaded else OffloadPolicy()
        for layer in (model.base_model.model if adapted else model).model.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        return fully_shard(model, mesh=mesh, offload_policy=policy)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, None, is_lora=adapted),
        sharding_strategy=ShardingStrategy[layout.strategy],
        device_mesh=mesh,
        device_id=CPU,
        use_orig_params=layout.use_orig_params,
    )


def strategy_of(module: torch.nn.Module) -> str:
    return "fsdp" if isinstance(module, FullyShardedDataParallel) else "fsdp2"


def served_adapter(module: torch.nn.Module, source: ParameterSource) -> ServedAdapter:
    """The adapter, as verl's trainer opens it for an engine that serves it."""
    engine = SimpleNamespace(module=module, model_config=SimpleNamespace(lora={}))
    backend = get_sharding_manager(strategy_of(module), "sglang").backend
    assert backend is not None
    return backend(engine, SyncConfig(), CPU, "bfloat16").open_adapter(source)


def source_of(
    module: torch.nn.Module,
    policy: WirePolicy,
    rewrite: Any,
    rename: Callable[[Any], Any] = lambda state: state,
    unsaved: frozenset[str] = frozenset(),
) -> ParameterSource:
    source: ParameterSource = reader_of(strategy_of(module))(module, Naming(policy, rewrite, rename, unsaved))
    return source


def open_source(module: torch.nn.Module, model_type: str) -> ParameterSource:
    return source_of(module, WirePolicy(torch.bfloat16, Wanted(*KEEP)), verl_rewrite(model_type))


def torchs_own_state(module: torch.nn.Module) -> State:
    """The whole model as PyTorch gathers it."""
    if isinstance(module, FullyShardedDataParallel):
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, config):
            state = module.state_dict()
    else:
        state = module.state_dict()
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.items()
    }


@torch.no_grad()
def change(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(1.25)


@dataclass(frozen=True)
class Variant:
    """Holds what users configure: keyword arguments of PEFT's ``LoraConfig``."""

    name: str
    model: str = "qwen2"
    config: dict[str, Any] = field(default_factory=dict)


def peft_model(variant: Variant) -> PeftModel:
    """The adapted model with random adapters, the same on every rank."""
    model = get_peft_model(build(variant.model), LoraConfig(r=3, lora_alpha=7, **variant.config))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.endswith("q_proj.base_layer.bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


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
    adapters = Adapters(model)
    renaming = partial(rename, in_use=adapters.copies)
    inner = source_of(module, policy, rewrite, renaming)
    weights = adapters.renamed(renaming)
    return MergingSource(inner, weights, CPU, merge, gather_bytes, adapters.check, timeout_seconds)


class BrokenOffError(Exception):
    """The failure in the middle of a sync."""


def deliver(
    source: MergingSource, bucket_bytes: int = TINY, break_off_after: int | None = None, sharded: bool = False
) -> State:
    """One sync; breaks off after some buckets if asked to."""

    def prepare(index: int, work: Any) -> None:
        if index == break_off_after:
            raise BrokenOffError
        for _ in work:
            pass

    return deliver_plan(source, *planned(source, bucket_bytes, sharded), prepare=prepare)


def assert_unchanged(before: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    after = torchs_own_state(module)
    assert all(torch.equal(before[name], after[name]) for name in before), "the sync changed the trainer"
