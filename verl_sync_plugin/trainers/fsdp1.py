# SPDX-License-Identifier: Apache-2.0
"""FSDP1 (``FullyShardedDataParallel``): parameters live in flat parameters, each cut into equal runs.

FSDP1's own sharded state dict gathers every unit and cuts it again; reading the flat parameters' local shards moves
nothing. The attributes used (``_handle``, ``flat_param``, ``_param_infos``, ...) are private to PyTorch but frozen
with FSDP1 itself, and the contract tests compare the result with ``state_dict()``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init

from verl_sync_plugin.layout.tensors import Base, Member, Shard, View, clean_name
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy, dtype_name
from verl_sync_plugin.trainers.naming import Rename, Rewrite, hf_views, saved_names


class FSDP1Source(ParameterSource):
    """Walks the flat parameters of ``root``, the root FSDP1 module, and its persistent buffers. A flat parameter that
    contains a kept name travels as a whole in the trainer's dtype. ``rewrite`` and ``rename`` are verl's; ``unsaved``:
    see ``naming.saved_names``."""

    def __init__(
        self,
        root: FullyShardedDataParallel,
        policy: WirePolicy,
        rewrite: Rewrite,
        rename: Rename,
        unsaved: frozenset[str] = frozenset(),
    ) -> None:
        self._root = root
        self._policy = policy
        self._rewrite = rewrite
        self._rename = rename
        self._unsaved = unsaved
        self._bases: dict[tuple[object, ...], Base] = {}
        self._members: dict[tuple[object, ...], tuple[Member, ...]] = {}

    def shards(self) -> list[Shard]:
        # Before the first forward FSDP1 has not laid out its local shards yet
        _lazy_init(self._root, self._root)
        shards = []
        for name, module in self._root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                shards.append(self._flat_parameter(clean_name(name), module._handle))
        return shards + self._buffers()

    def _flat_parameter(self, unit: str, handle: Any) -> Shard:
        flat = handle.flat_param
        full = int(flat._unpadded_unsharded_size.numel())
        lengths: tuple[int, ...]
        if not handle.uses_sharded_strategy or handle.world_size == 1:
            lengths, local = (full,), partial(_head, flat, full)
        else:
            self.group = handle.process_group
            run = int(flat._local_shard.numel())
            lengths = tuple(max(min(run, full - rank * run), 0) for rank in range(handle.world_size))
            local = partial(_head, flat._local_shard, lengths[handle.rank])
        key = (unit, flat.dtype, lengths)
        if key not in self._bases:
            self._members[key] = self._find_members(unit, flat)
            self._bases[key] = self._describe(unit, flat, lengths, self._members[key])
        return Shard(self._bases[key], local, members=self._members[key])

    def _describe(self, unit: str, flat: Any, lengths: tuple[int, ...], members: tuple[Member, ...]) -> Base:
        views: list[View] = []
        for member in members:
            tied = [other.name for other in members if other.start == member.start]
            if member.name not in saved_names(tied, self._unsaved):
                continue
            views.extend(hf_views(member.name, member.shape, flat.dtype, member.start, self._rewrite, member.strides))
        names = [*(member.name for member in members), *(view.name for view in views)]
        wire = self._policy.of_parameter(names, flat.dtype)
        key = f"flat parameter of {unit or 'the root'}"
        return Base(key, dtype_name(wire), wire.itemsize, lengths, tuple(views))

    def _find_members(self, unit: str, flat: Any) -> tuple[Member, ...]:
        """Every parameter in a flat parameter, shared ones under all their names; each in the order of its memory."""
        starts, offset = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                starts.append(offset)
            offset += numel
        prefix = f"{unit}." if unit else ""
        members: dict[str, tuple[tuple[int, ...], int, tuple[int, ...] | None]] = {}
        for fqn, shape, start, held in zip(flat._fqns, flat._shapes, starts, flat._strides, strict=True):
            name = prefix + clean_name(fqn)
            members[name] = (tuple(shape), start, _strides(name, tuple(shape), tuple(held)))
        for shared in flat._shared_param_infos:
            owner = prefix + clean_name(_join(shared.prim_module_name, shared.prim_param_name))
            members[prefix + clean_name(_join(shared.module_name, shared.param_name))] = members[owner]
        return tuple(Member(name, *place) for name, place in self._rename(members).items())

    def _buffers(self) -> list[Shard]:
        found = {}
        for module_name, module in self._root.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[clean_name(_join(module_name, name))] = buffer
        return [self._buffer(name, buffer) for name, buffer in self._rename(found).items()]

    def _buffer(self, name: str, buffer: torch.Tensor) -> Shard:
        key = (name, tuple(buffer.shape), buffer.dtype)
        if key not in self._bases:
            views = hf_views(name, tuple(buffer.shape), buffer.dtype, 0, self._rewrite)
            dtype = dtype_name(buffer.dtype)
            self._bases[key] = Base(name, dtype, buffer.dtype.itemsize, (buffer.numel(),), tuple(views))
        return Shard(self._bases[key], partial(_head, buffer, buffer.numel()))


def _strides(name: str, shape: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a parameter in the flat one; ``None`` where they are those of its shape. Raises ValueError where
    its elements do not fill its memory, of which FSDP1 keeps as many elements as the parameter has."""
    if torch.empty_strided(shape, held, device="meta").is_contiguous():
        return None
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(held, shape, strict=True) if size > 1):
        if stride != filled:
            raise ValueError(
                f"parameter {name!r} has strides {held} for shape {shape}: there are gaps or repetitions between its "
                "elements, and FSDP1 keeps others in their place. Give the model a parameter that is contiguous()."
            )
        filled *= size
    return held


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _head(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:count]
