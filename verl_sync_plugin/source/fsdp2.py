"""FSDP2 (``fully_shard``): every parameter is a DTensor, cut along dimension 0 over the last mesh dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from verl_sync_plugin.bucket import Base, View
from verl_sync_plugin.source.base import Member, ParameterSource, Shard, WirePolicy, dtype_name
from verl_sync_plugin.source.naming import Rewrite, hf_views

StateDict = Callable[[], Mapping[str, torch.Tensor]]


class FSDP2Source(ParameterSource):
    """Walks a ``fully_shard``-ed module: parameters and persistent buffers, nothing gathered, nothing copied.

    Args:
        state_dict: returns the trainer's state dict after verl's renaming; values are DTensors or plain tensors.
        parameters: which of its names are parameters (the rest are buffers and keep their dtype).
        policy: wire dtypes.
        rewrite: verl's stream rewriting.
    """

    def __init__(self, state_dict: StateDict, parameters: set[str], policy: WirePolicy, rewrite: Rewrite) -> None:
        super().__init__()
        self._state_dict = state_dict
        self._state: Mapping[str, torch.Tensor] = {}
        self._parameters = parameters
        self._policy = policy
        self._rewrite = rewrite
        self._bases: dict[tuple[object, ...], Base] = {}

    def shards(self) -> list[Shard]:
        self._state = self._state_dict()
        try:
            return [self._shard(names) for names in self._tied().values()]
        finally:
            self._state = {}

    def _tied(self) -> dict[tuple[object, ...], list[str]]:
        """Names by storage: tied parameters (embedding and head) travel once, under all their names."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in self._state.items():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            identity = (local.untyped_storage()._cdata, local.storage_offset(), tuple(tensor.shape))
            groups.setdefault(identity, []).append(name)
        return groups

    def _shard(self, names: list[str]) -> Shard:
        name, tensor = names[0], self._state[names[0]]
        if isinstance(tensor, DTensor):
            lengths, local = self._dtensor(name, tensor)
        else:
            lengths, local = (tensor.numel(),), partial(_flat, tensor)
        key = (*names, tuple(tensor.shape), tensor.dtype, lengths)
        if key not in self._bases:
            self._bases[key] = self._describe(names, tensor, lengths)
        members = tuple(Member(each, tuple(tensor.shape), 0) for each in names if each in self._parameters)
        held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        run = held.detach() if held.is_contiguous() else None
        return Shard(self._bases[key], local, members=members, run=run)

    def _describe(self, names: list[str], tensor: torch.Tensor, lengths: tuple[int, ...]) -> Base:
        wire = tensor.dtype
        if self._parameters.intersection(names):
            wire = self._policy.of_parameter(names, tensor.dtype)
        views: list[View] = []
        for name in names:
            views.extend(hf_views(name, tuple(tensor.shape), tensor.dtype, 0, self._rewrite))
        return Base(names[0], dtype_name(wire), wire.itemsize, lengths, tuple(views))

    def _dtensor(self, name: str, tensor: DTensor) -> tuple[tuple[int, ...], Callable[[], torch.Tensor]]:
        mesh, placements = tensor.device_mesh, tensor.placements
        *outer, last = placements
        sharded = isinstance(last, ShardPlacement) and last.dim == 0
        if not all(isinstance(p, Replicate) for p in outer) or not (sharded or isinstance(last, Replicate)):
            raise ValueError(
                f"parameter {name!r} has placements {placements}; weight sync knows dimension-0 shards over the last "
                "mesh dimension. Set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl."
            )
        local = tensor._local_tensor
        world = mesh.size(mesh.ndim - 1)
        if not sharded or world == 1:
            return (tensor.numel(),), partial(_flat, local)
        lengths = even_chunks(tensor.shape[0], world, tensor.numel() // max(tensor.shape[0], 1))
        rank = mesh.get_local_rank(mesh.ndim - 1)
        if local.numel() != lengths[rank]:
            raise ValueError(f"parameter {name!r}: rank {rank} holds {local.numel()} elements, not {lengths[rank]}")
        self._group = mesh.get_group(mesh.ndim - 1)
        return lengths, partial(_flat, local)


def even_chunks(rows: int, world: int, row_numel: int) -> tuple[int, ...]:
    """Elements per rank when ``rows`` are cut like ``torch.chunk``: equal chunks, the last ones shorter or empty."""
    step = -(-rows // world)
    return tuple(max(min(step, rows - rank * step), 0) * row_numel for rank in range(world))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)
