# SPDX-License-Identifier: Apache-2.0
"""Real models sharded by FSDP and FSDP2 the way verl does, and the sources over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from contract.sources import Wanted
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.naming import verl_rewrite

KEEP = (r"\.gate\.weight$", r"layers\.0\.input_layernorm")
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How the trainer shards: ``strategy`` is empty for FSDP2."""

    mesh: tuple[int, ...]
    strategy: str = ""
    use_orig_params: bool = False

    @property
    def size(self) -> int:
        return int(torch.tensor(self.mesh).prod())

    def __str__(self) -> str:
        name = f"fsdp1-{self.strategy}-{'orig' if self.use_orig_params else 'flat'}" if self.strategy else "fsdp2"
        return f"{name}-{'x'.join(map(str, self.mesh))}"


LAYOUTS = [Layout(mesh) for mesh in ((1,), (2,), (3,), (2, 2))] + [
    Layout(mesh, strategy, use_orig_params)
    for use_orig_params in (True, False)
    for mesh, strategy in (
        ((1,), "FULL_SHARD"),
        ((2,), "FULL_SHARD"),
        ((3,), "FULL_SHARD"),
        ((3,), "SHARD_GRAD_OP"),
        ((2, 2), "HYBRID_SHARD"),
        ((2,), "NO_SHARD"),
    )
]


def shard(model: PreTrainedModel, layout: Layout) -> torch.nn.Module:
    """Wraps like verl: one unit per decoder layer and the root."""
    names = ("replicas", "shards")[-len(layout.mesh) :]
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=names)
    layers = list(model.model.layers)
    if not layout.strategy:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    wrap = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap,
        sharding_strategy=ShardingStrategy[layout.strategy],
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=layout.use_orig_params,
    )


def open_source(module: torch.nn.Module, layout: Layout, model_type: str) -> ParameterSource:
    policy, rewrite = WirePolicy(torch.bfloat16, Wanted(*KEEP)), verl_rewrite(model_type)
    if isinstance(module, FullyShardedDataParallel):
        return FSDP1Source(module, policy, rewrite, lambda state: state)
    return FSDP2Source(module, policy, rewrite)


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
