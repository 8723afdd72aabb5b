# SPDX-License-Identifier: Apache-2.0
"""Tensors by name, some of them DTensors that are cut along dimension 0 over the last mesh dimension: FSDP2
(``fully_shard``), DDP, plain modules and state dicts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from verl_sync_plugin.layout.tensors import Base, Member, Shard, View
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy, dtype_name
from verl_sync_plugin.trainers.naming import Rename, Rewrite, hf_views, saved_names

Identity = tuple[Any, ...]


@dataclass(frozen=True)
class _Known:
    """A tensor's description, valid as long as its layout; keeps no memory of the trainer alive."""

    layout: object
    names: list[str]
    base: Base
    members: tuple[Member, ...]


class StateDictSource(ParameterSource):
    """Reads a plain state dict: nothing gathered, nothing copied.

    Args:
        given: returns all tensors or DTensors of a sync by the trainer's names, in model order; tied ones are views of
            the same memory.
        rewrite: verl's.
        unsaved: see ``naming.saved_names``.
        parameters: names whose tensors travel in the wire dtype; ``None``: all, for a state dict does not tell buffers
            from parameters.
    """

    def __init__(
        self,
        given: Callable[[], Mapping[str, torch.Tensor]],
        policy: WirePolicy,
        rewrite: Rewrite,
        unsaved: frozenset[str] = frozenset(),
        parameters: Container[str] | None = None,
    ) -> None:
        self._given = given
        self._policy = policy
        self._rewrite = rewrite
        self._unsaved = unsaved
        self._parameters = parameters
        self._groups: list[list[str]] = []
        self._known: dict[str, _Known] = {}

    def shards(self) -> list[Shard]:
        state = self._given()
        if not _tied_alike(state, self._groups):
            self._groups = _tied(state)
        return [self._shard(names, state[names[0]]) for names in self._groups]

    def _shard(self, names: list[str], tensor: torch.Tensor) -> Shard:
        held = _local(tensor)
        layout: object = tensor._spec if isinstance(tensor, DTensor) else (tensor.shape, tensor.dtype)
        known = self._known.get(names[0])
        if known is None or (known.layout is not layout and known.layout != layout) or known.names != names:
            known = self._known[names[0]] = self._learn(names, tensor, layout)
        run = held if type(held) is torch.Tensor and not held.requires_grad else held.detach()
        return Shard(known.base, partial(run.reshape, -1), None, known.members, run if run.is_contiguous() else None)

    def _learn(self, names: list[str], tensor: torch.Tensor, layout: object) -> _Known:
        lengths = self._lengths(names[0], tensor) if isinstance(tensor, DTensor) else (tensor.numel(),)
        parameters = names if self._parameters is None else [each for each in names if each in self._parameters]
        members = tuple(Member(each, tuple(tensor.shape), 0) for each in parameters)
        views: list[View] = []
        for name in saved_names(names, self._unsaved):
            views.extend(hf_views(name, tuple(tensor.shape), tensor.dtype, 0, self._rewrite))
        wire = tensor.dtype
        if members:
            wire = self._policy.of_parameter([*names, *(view.name for view in views)], tensor.dtype)
        base = Base(names[0], dtype_name(wire), wire.itemsize, lengths, tuple(views))
        return _Known(layout, names, base, members)

    def _lengths(self, name: str, tensor: DTensor) -> tuple[int, ...]:
        mesh, placements = tensor.device_mesh, tensor.placements
        *outer, last = placements
        sharded = isinstance(last, ShardPlacement) and last.dim == 0
        if not all(isinstance(p, Replicate) for p in outer) or not (sharded or isinstance(last, Replicate)):
            raise ValueError(
                f"parameter {name!r} has placements {placements}; weight sync knows dimension-0 shards over the last "
                "mesh dimension. Set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl."
            )
        world = mesh.size(mesh.ndim - 1)
        if not sharded or world == 1:
            return (tensor.numel(),)
        lengths = even_chunks(tensor.shape[0], world, tensor.numel() // max(tensor.shape[0], 1))
        rank, held = mesh.get_local_rank(mesh.ndim - 1), tensor._local_tensor.numel()
        if held != lengths[rank]:
            raise ValueError(f"parameter {name!r}: rank {rank} holds {held} elements, not {lengths[rank]}")
        self.group = mesh.get_group(mesh.ndim - 1)
        return lengths


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def identity(tensor: torch.Tensor) -> Identity:
    local = _local(tensor)
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(tensor.shape), local.stride()


def _tied(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names by storage: tied parameters (embedding and head) travel once, under all their names."""
    groups: dict[Identity, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(identity(tensor), []).append(name)
    return list(groups.values())


def _tied_alike(state: Mapping[str, torch.Tensor], groups: list[list[str]]) -> bool:
    """True if ``_tied`` would surely group the same names; quicker than asking each tensor for its storage."""
    if {name for names in groups for name in names} != state.keys():
        return False
    if any(state[name] is not state[names[0]] for names in groups if len(names) > 1 for name in names):
        return False
    places = [place for names in groups if (place := _local(state[names[0]]).data_ptr())]  # 0: an empty one
    return len(set(places)) == len(places)


def even_chunks(rows: int, world: int, row_numel: int) -> tuple[int, ...]:
    """Elements per rank when ``rows`` are cut like ``torch.chunk``: equal chunks, the last ones shorter or empty."""
    step = -(-rows // world)
    return tuple(max(min(step, rows - rank * step), 0) * row_numel for rank in range(world))


class _Slot(NamedTuple):
    """A module's place for a tensor. Offloading may put another one there."""

    module: torch.nn.Module
    held: str  # as what: ``_parameters`` or ``_buffers``
    attribute: str


class FSDP2Source(StateDictSource):
    """Walks a ``fully_shard``-ed module: parameters and persistent buffers. ``state_dict()`` is asked once, for the
    names, which ``rename`` changes as verl does; with hundreds of modules it costs more than moving the weights."""

    def __init__(
        self,
        module: torch.nn.Module,
        policy: WirePolicy,
        rewrite: Rewrite,
        rename: Rename = lambda state: state,
        unsaved: frozenset[str] = frozenset(),
    ) -> None:
        parameters = set(rename(dict(module.named_parameters(remove_duplicate=False))))
        super().__init__(self._state, policy, rewrite, unsaved, parameters)
        self._module = module
        self._rename = rename
        self._slots: dict[str, _Slot] = {}
        self._units: list[FSDPModule] = []
        self._sharded: list[str] = []

    def _state(self) -> dict[str, torch.Tensor]:
        if not self._slots:
            named = self._rename(dict(self._module.state_dict()))
            self._find_slots(named)
            return named
        for unit in self._units:
            unit.reshard()  # as a hook of state_dict() does: after a forward pass the root is still gathered
        state: dict[str, torch.Tensor] = {
            name: module.__dict__[held][attribute] for name, (module, held, attribute) in self._slots.items()
        }
        if [name for name, tensor in state.items() if isinstance(tensor, DTensor)] != self._sharded:
            # A forward pass that raised leaves the root gathered, and only the hook of state_dict() gets past that
            return self._rename(dict(self._module.state_dict()))
        return state

    def _find_slots(self, state: Mapping[str, torch.Tensor]) -> None:
        """Finds where modules keep the tensors; finds none when a hook made any, and then the state dict is asked every
        time."""
        places: dict[Identity, _Slot] = {}
        for module in self._module.modules():
            for held in ("_parameters", "_buffers"):
                for attribute, tensor in module.__dict__[held].items():
                    if tensor is not None:
                        places[identity(tensor)] = _Slot(module, held, attribute)
        found = {name: places.get(identity(tensor)) for name, tensor in state.items()}
        if None not in found.values():
            self._slots = {name: slot for name, slot in found.items() if slot is not None}
            self._sharded = [name for name, tensor in state.items() if isinstance(tensor, DTensor)]
            self._units = [module for module in self._module.modules() if isinstance(module, FSDPModule)]
