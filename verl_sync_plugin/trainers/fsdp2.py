# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``): every parameter is a DTensor, cut along dimension 0 over the last mesh dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_sync_plugin.trainers.dtensors import DTensorSource, Identity, identity
from verl_sync_plugin.trainers.naming import Rewrite
from verl_sync_plugin.trainers.wire import WirePolicy

Rename = Callable[[dict[str, Any]], dict[str, Any]]


class _Slot(NamedTuple):
    """Where a module keeps a tensor. Offloading may put another one there."""

    module: torch.nn.Module
    held: str  # as what: ``_parameters`` or ``_buffers``
    attribute: str


class FSDP2Source(DTensorSource):
    """Walks a ``fully_shard``-ed module: parameters and persistent buffers, nothing gathered, nothing copied.

    ``state_dict()`` is asked once, for the names; with hundreds of modules it costs more than moving the weights.

    Args:
        module: the root.
        policy: wire dtypes.
        rewrite: verl's stream rewriting.
        rename: verl's renaming of a state dict.
        unsaved: second names of tied parameters, see ``naming.saved_names``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        policy: WirePolicy,
        rewrite: Rewrite,
        rename: Rename = lambda state: state,
        unsaved: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(policy, rewrite, unsaved)
        self._module = module
        self._rename = rename
        self._slots: dict[str, _Slot] = {}
        self._units: list[FSDPModule] = []
        self._sharded: list[str] = []
        self._parameters = set(rename(dict(module.named_parameters(remove_duplicate=False))))

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
