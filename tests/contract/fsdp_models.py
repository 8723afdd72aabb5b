# SPDX-License-Identifier: Apache-2.0
"""Tiny HF models, with LoRA or without, sharded by FSDP and FSDP2 the way verl does, and the sources over them."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from contract import sources
from contract.reading import CPU, State

KEEP = (r"\.gate\.weight$", r"layers\.0\.input_layernorm")
# Odd, so that shards are uneven and some ranks hold nothing of a parameter
VOCABULARY = 323
SIZES = {
    "hidden_size": 60, "intermediate_size": 85, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 10,
}  # fmt: skip
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
CONFIGS: dict[str, PretrainedConfig] = {
    name: AutoConfig.for_model(name.removesuffix("_tied"), **SIZES, **MOE, tie_word_embeddings=name.endswith("_tied"))
    for name in ("llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe")
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
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))
    model(input_ids=tokens, labels=tokens).loss.backward()
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
    units: bool = False  # FSDP2 also shards every adapted layer by itself, and gives it a class of its own

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        name = f"fsdp1-{self.strategy}-{'orig' if self.use_orig_params else 'flat'}" if self.strategy else "fsdp2"
        return f"{name}-{'x'.join(map(str, self.mesh))}{'-offloaded' * self.offloaded}{'-units' * self.units}"


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


def shard(model: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    """Wraps like verl: one unit per decoder layer, if there are any, and the root; FSDP1 more of a PEFT model."""
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=("replicas", "shards")[-len(layout.mesh) :])
    inner: Any = model.base_model.model if isinstance(model, PeftModel) else model
    layers = inner.model.layers if hasattr(inner, "model") else []
    if not layout.strategy:
        policy = fsdp.CPUOffloadPolicy(pin_memory=False) if layout.offloaded else fsdp.OffloadPolicy()
        for adapted_layer in [each for each in model.modules() if layout.units and isinstance(each, LoraLayer)]:
            fully_shard(adapted_layer, mesh=mesh)  # type: ignore[arg-type]
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        return fully_shard(model, mesh=mesh, offload_policy=policy)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, None, is_lora=isinstance(model, PeftModel)) if layers else None,
        sharding_strategy=fsdp.ShardingStrategy[layout.strategy],
        device_mesh=mesh,
        device_id=CPU,
        use_orig_params=layout.use_orig_params,
    )


def strategy_of(module: torch.nn.Module) -> str:
    return "fsdp" if isinstance(module, FullyShardedDataParallel) else "fsdp2"


class ModelConfig(SimpleNamespace):
    """Stands for verl's."""

    lora_rank = 0

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


def engine_of(module: torch.nn.Module, merge: bool = True) -> Any:
    """Stands for verl's engine of a sharded model."""
    model: Any = getattr(module, "_fsdp_wrapped_module", module)
    return SimpleNamespace(module=module, model_config=ModelConfig(hf_config=model.config, lora={"merge": merge}))


def manager_of(module: torch.nn.Module, server: Any, leads: bool = True, merge: bool = True, **keys: Any) -> Any:
    return sources.manager_of(strategy_of(module), engine_of(module, merge), server, leads, **keys)


def open_source(module: torch.nn.Module, *kept: str, merge: bool = True, **settings: Any) -> Any:
    return sources.open_source(strategy_of(module), engine_of(module, merge), *kept, **settings)


def torchs_own_state(module: torch.nn.Module) -> State:
    """The whole model as PyTorch gathers it."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def change(module: torch.nn.Module) -> None:
    """Neighbours change by different factors, so that two which were equal are no longer."""
    for number, parameter in enumerate(module.parameters()):
        parameter.mul_(1.25 + number % 4 / 16)


@dataclass(frozen=True)
class Variant:
    """Holds what users configure: keyword arguments of PEFT's ``LoraConfig``, and of a second adapter's."""

    name: str
    model: str = "qwen2"
    config: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] | None = None
    in_use: str = "default"


def peft_model(variant: Variant) -> PeftModel:
    """The adapted model with random adapters, the same on every rank."""
    model = get_peft_model(build(variant.model), LoraConfig(r=3, lora_alpha=7, **variant.config))
    if variant.second is not None:
        model.add_adapter("second", LoraConfig(r=2, **variant.second))
        model.set_adapter(variant.in_use)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.endswith("q_proj.base_layer.bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def merging_source(module: torch.nn.Module, gather_bytes: int = 40_000, **settings: Any) -> Any:
    """By default so small that the factors of a few buckets are gathered at a time."""
    source = open_source(module, **settings)
    source._gather_bytes = gather_bytes
    return source
