# SPDX-License-Identifier: Apache-2.0
"""Tensors by name, some of them DTensors that are cut along dimension 0 over the last mesh dimension: FSDP2
(``fully_shard``), DDP, plain modules and state dicts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.layout.tensors import Base, ParameterName, Shard
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.naming import Naming, Rename

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Known:
    """A tensor's description, valid as long as its layout; keeps no memory of the trainer alive."""

    layout: object
    names: list[str]
    base: Base
    members: tuple[ParameterName, ...]


class StateDictSource(ParameterSource):
    """Reads a plain state dict. ``given`` returns all tensors or DTensors of a sync by the trainer's names, in model
    order; tied ones are views of the same memory. ``parameters`` are names whose tensors travel in the wire dtype;
    ``None``: all, for a state dict does not tell buffers from parameters."""

    def __init__(self, given: Callable[[], State], naming: Naming, parameters: Container[str] | None = None) -> None:
        self._given = given
        self._naming = naming
        self._parameters = parameters
        self._known: dict[str, _Known] = {}

    def shards(self) -> list[Shard]:
        state = dict(self._given())  # also of a mapping that makes its tensors: their memory tells which are tied
        return [self._shard(names, state[names[0]]) for names in _tied(state)]

    def _shard(self, names: list[str], tensor: torch.Tensor) -> Shard:
        held = local(tensor)
        layout: object = tensor._spec if isinstance(tensor, DTensor) else (tensor.shape, tensor.dtype)
        known = self._known.get(names[0])
        if known is None or (known.layout is not layout and known.layout != layout) or known.names != names:
            known = self._known[names[0]] = self._learn(names, tensor, layout)
        run = held if type(held) is torch.Tensor and not held.requires_grad else held.detach()
        plain = type(run) is torch.Tensor and run.is_contiguous()  # else torch reads it: a subclass may have no memory
        return Shard(known.base, partial(run.reshape, -1), None, known.members, run if plain else None)

    def _learn(self, names: list[str], tensor: torch.Tensor, layout: object) -> _Known:
        lengths = self._lengths(names[0], tensor) if isinstance(tensor, DTensor) else (tensor.numel(),)
        held = [ParameterName(name, tuple(tensor.shape)) for name in names]
        members = tuple(each for each in held if self._parameters is None or each.name in self._parameters)
        base = self._naming.base_of(names[0], held, tensor.dtype, lengths, bool(members))
        return _Known(layout, names, base, members)

    def _lengths(self, name: str, tensor: DTensor) -> tuple[int, ...]:
        mesh = tensor.device_mesh
        if (sharded := cut(tensor)) is None:
            raise ValueError(
                f"parameter {name!r} has placements {tensor.placements}; weight sync supports only dimension-0 shards "
                f"over the last mesh dimension. In a script give a state dict with its full_tensor(); else {TURN_OFF}."
            )
        world = mesh.size(mesh.ndim - 1)
        if not sharded or world == 1:
            return (tensor.numel(),)
        rows = tensor.shape[0]
        step = -(-rows // world)  # rows of each chunk of torch.chunk; the last ones are shorter or empty
        chunks = (max(min(step, rows - rank * step), 0) for rank in range(world))
        lengths = tuple(chunk * (tensor.numel() // max(rows, 1)) for chunk in chunks)
        rank, held = mesh.get_local_rank(mesh.ndim - 1), tensor._local_tensor.numel()
        if held != lengths[rank]:
            raise ValueError(f"parameter {name!r}: rank {rank} holds {held} elements, not {lengths[rank]}")
        self.group = mesh.get_group(mesh.ndim - 1)
        return lengths


def cut(tensor: DTensor) -> bool | None:
    """True if a DTensor is cut along dimension 0, over the last dimension of its mesh, as FSDP2 and HSDP do; False if
    every rank holds it whole; ``None`` if it is placed otherwise."""
    *outer, last = tensor.placements
    sharded = type(last) is ShardPlacement and last.dim == 0
    known = all(isinstance(each, Replicate) for each in outer) and (sharded or isinstance(last, Replicate))
    return sharded if known else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _tied(state: State) -> list[list[str]]:
    """Names by storage: tied parameters (embedding and head) travel once, under all their names."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state.items():
        held = local(tensor)
        place = held.untyped_storage()._cdata, held.storage_offset(), tuple(tensor.shape), held.stride()
        groups.setdefault(place, []).append(name)
    return list(groups.values())


class _Module:
    """The tensors of a module by the names of its state dict, which is asked once: with hundreds of modules that costs
    more than moving the weights."""

    def __init__(self, module: torch.nn.Module, rename: Rename) -> None:
        self._module = module
        self._rename = rename
        # A module's ``_parameters`` or ``_buffers`` and the attribute, by name; offloading may put another tensor there
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        self._units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self._sharded: list[str] = []

    def state(self) -> State:
        if self._slots:
            for unit in self._units:
                unit.reshard()  # as a hook of state_dict() does: after a forward pass the root is still gathered
            state = {name: place[attribute] for name, (place, attribute) in self._slots.items()}
            if _sharded(state) == self._sharded:
                return state
        # A forward pass that raised leaves the root gathered, and only the hook of state_dict() gets past that
        named: State = self._rename(dict(self._module.state_dict(keep_vars=True)))
        if not self._slots:
            self._find_slots(named)
        return named

    def _find_slots(self, state: State) -> None:
        """Finds where modules keep the tensors; nowhere when a hook made any: the state dict is asked every time."""
        places = {
            id(tensor): (place, attribute)
            for module in self._module.modules()
            for place in (module._parameters, module._buffers)
            for attribute, tensor in place.items()
        }
        if places.keys() >= set(map(id, state.values())):
            self._slots = {name: places[id(tensor)] for name, tensor in state.items()}
            self._sharded = _sharded(state)


def _sharded(state: State) -> list[str]:
    return [name for name, tensor in state.items() if isinstance(tensor, DTensor)]


class FSDP2Source(StateDictSource):
    """Reads parameters and persistent buffers of a ``fully_shard``-ed module."""

    def __init__(self, module: torch.nn.Module, naming: Naming) -> None:
        super().__init__(_Module(module, naming.rename).state, naming, naming.parameters_of(module))
