# SPDX-License-Identifier: Apache-2.0
"""FSDP1 (``FullyShardedDataParallel``): parameters live in flat parameters, each cut into equal runs.

FSDP1's own sharded state dict gathers every unit and cuts it again; reading local shards moves nothing. The attributes
used (``_handle``, ``flat_param``, ...) are private to PyTorch, but frozen with FSDP1 itself.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init

from verl_sync_plugin.layout.load_map import own_box
from verl_sync_plugin.layout.tensors import Base, Member, Shard, clean_name
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.naming import Naming


class FSDP1Source(ParameterSource):
    """Walks the flat parameters of ``root``, the root FSDP1 module, and its persistent buffers. A flat parameter that
    contains a kept name travels as a whole in the trainer's dtype."""

    def __init__(self, root: FullyShardedDataParallel, naming: Naming) -> None:
        self._root = root
        self._naming = naming
        self._known: dict[tuple[object, ...], tuple[Base, tuple[Member, ...]]] = {}

    def shards(self) -> list[Shard]:
        # Before the first forward FSDP1 has not laid out its local shards yet
        _lazy_init(self._root, self._root)
        shards, buffers = [], {}
        for name, module in self._root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                shards.append(self._flat_parameter(clean_name(name), module._handle))
            for own, buffer in module.named_buffers(recurse=False):
                if own not in module._non_persistent_buffers_set:
                    buffers[clean_name(_join(name, own))] = buffer
        return shards + [self._buffer(name, buffer) for name, buffer in self._naming.rename(buffers).items()]

    def _flat_parameter(self, unit: str, handle: Any) -> Shard:
        flat = handle.flat_param
        full = int(flat._unpadded_unsharded_size.numel())
        lengths: tuple[int, ...] = (full,)
        local = partial(_head, flat, full)
        if handle.uses_sharded_strategy and handle.world_size > 1:
            self.group = handle.process_group
            run = int(flat._local_shard.numel())
            lengths = tuple(max(min(run, full - rank * run), 0) for rank in range(handle.world_size))
            local = partial(_head, flat._local_shard, lengths[handle.rank])
        key = (unit, flat.dtype, lengths)
        if key not in self._known:
            members = self._find_members(unit, flat)
            name = f"flat parameter of {unit or 'the root'}"
            self._known[key] = self._naming.base_of(name, members, flat.dtype, lengths), members
        base, members = self._known[key]
        return Shard(base, local, members=members, run=local())

    def _find_members(self, unit: str, flat: Any) -> tuple[Member, ...]:
        """Every parameter in a flat parameter, shared ones under all their names; each in the order of its memory."""
        offsets = accumulate(flat._numels_with_padding, initial=0)
        starts = [at for at, padding in zip(offsets, flat._is_padding_mask, strict=False) if not padding]
        members: dict[str, tuple[tuple[int, ...], int, tuple[int, ...] | None]] = {}
        for fqn, shape, start, held in zip(flat._fqns, flat._shapes, starts, flat._strides, strict=True):
            name = _join(unit, clean_name(fqn))
            members[name] = (tuple(shape), start, _strides(name, tuple(shape), tuple(held)))
        for shared in flat._shared_param_infos:
            owner = _join(unit, clean_name(_join(shared.prim_module_name, shared.prim_param_name)))
            members[_join(unit, clean_name(_join(shared.module_name, shared.param_name)))] = members[owner]
        return tuple(Member(name, *place) for name, place in self._naming.rename(members).items())

    def _buffer(self, name: str, buffer: torch.Tensor) -> Shard:
        key = (name, tuple(buffer.shape), buffer.dtype)
        if key not in self._known:
            held = Member(name, tuple(buffer.shape), 0)
            self._known[key] = self._naming.base_of(name, [held], buffer.dtype, (buffer.numel(),), parameter=False), ()
        run = buffer if buffer.is_contiguous() else None
        return Shard(self._known[key][0], partial(_head, buffer, buffer.numel()), run=run)


def _strides(name: str, shape: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a parameter in the flat one; ``None`` where they are those of its shape. Raises ValueError where
    its elements do not fill its memory, of which FSDP1 keeps as many elements as the parameter has."""
    if torch.empty_strided(shape, held, device="meta").is_contiguous():
        return None
    if own_box(shape, held).dims != ((prod(shape), 1, 1),):
        raise ValueError(
            f"parameter {name!r} has strides {held} for shape {shape}: there are gaps or repetitions between its "
            "elements, and FSDP1 keeps others in their place. Give the model a parameter that is contiguous()."
        )
    return held


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _head(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:count]
