# SPDX-License-Identifier: Apache-2.0
"""FSDP1 (``FullyShardedDataParallel``): parameters live in flat parameters, each cut into equal runs.

FSDP1's own sharded state dict gathers every unit and cuts it again; reading local shards moves nothing. The attributes
used (``_handle``, ``flat_param``, ...) are private to PyTorch, but frozen with FSDP1 itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init

from verl_sync_plugin.layout.load_map import full_box
from verl_sync_plugin.layout.tensors import Base, ParameterName, Shard, clean_name
from verl_sync_plugin.trainers.fsdp2 import StateDictSource
from verl_sync_plugin.trainers.naming import Naming


class FSDP1Source(StateDictSource):
    """Walks the flat parameters of ``root``, the root FSDP1 module, and its persistent buffers. Each parameter is a
    base of its own, tied ones together."""

    def __init__(self, root: FullyShardedDataParallel, naming: Naming) -> None:
        super().__init__(lambda: naming.rename(self._others), naming, naming.parameters_of(root))
        self._root = root
        self._others: dict[str, torch.Tensor] = {}  # buffers, and parameters that FSDP1 is to ignore
        # The bases of each flat parameter, and where in it they begin
        self._cuts: dict[tuple[object, ...], list[tuple[Base, tuple[ParameterName, ...], int]]] = {}

    def shards(self) -> list[Shard]:
        # Before the first forward FSDP1 has not laid out its local shards yet
        _lazy_init(self._root, self._root)
        shards, self._others = list[Shard](), {}
        for name, module in self._root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                shards += self._flat_parameter(clean_name(name), module._handle)
            ignored = ((own, p) for own, p in module.named_parameters(recurse=False) if p in self._root._ignored_params)
            for own, tensor in (*module.named_buffers(recurse=False), *ignored):
                if own not in module._non_persistent_buffers_set:
                    self._others[clean_name(_join(name, own))] = tensor
        shards += super().shards()
        self._others = {}
        return shards

    def _flat_parameter(self, unit: str, handle: Any) -> Iterator[Shard]:
        if handle._use_orig_params and not handle._skip_writeback_check:  # as before its own state dict
            handle._writeback_orig_params()  # takes over parameters whose ``data`` was replaced
        flat = handle.flat_param
        full = int(flat._unpadded_unsharded_size.numel())
        own, edges, rank = flat, [0, full], 0
        if handle.uses_sharded_strategy and handle.world_size > 1:
            self.group, own, rank = handle.process_group, flat._local_shard, handle.rank
            edges = [min(each * own.numel(), full) for each in range(handle.world_size + 1)]  # of the ranks' runs
        key = (unit, flat.dtype, *edges)
        if key not in self._cuts:
            self._cuts[key] = list(self._cut(unit, flat, edges))
        own = own.detach().reshape(-1)
        for base, members, start in self._cuts[key]:
            count = base.held(rank)
            run = own.narrow(0, max(start - edges[rank], 0) if count else 0, count)
            yield Shard(base, partial(run.reshape, -1), members=members, run=run)

    def _cut(self, unit: str, flat: Any, edges: list[int]) -> Iterator[tuple[Base, tuple[ParameterName, ...], int]]:
        """Every parameter in a flat one as a base (of each rank's run what is in it), with all its names, and where it
        begins."""
        offsets = accumulate(flat._numels_with_padding, initial=0)
        starts = [at for at, padding in zip(offsets, flat._is_padding_mask, strict=False) if not padding]
        places: dict[str, tuple[int, tuple[int, ...], tuple[int, ...] | None]] = {}
        for fqn, shape, start, held in zip(flat._fqns, flat._shapes, starts, flat._strides, strict=True):
            name = _join(unit, clean_name(fqn))
            places[name] = start, tuple(shape), _strides(name, tuple(shape), tuple(held))
        for shared in flat._shared_param_infos:
            owner = _join(unit, clean_name(_join(shared.prim_module_name, shared.prim_param_name)))
            places[_join(unit, clean_name(_join(shared.module_name, shared.param_name)))] = places[owner]
        found: dict[tuple[Any, ...], list[ParameterName]] = defaultdict(list)
        for name, place in self._naming.rename(places).items():
            found[place].append(ParameterName(name, *place[1:]))
        for (start, shape, _), members in found.items():
            end = start + prod(shape)
            lengths = tuple(max(min(high, end) - max(low, start), 0) for low, high in pairwise(edges))
            yield self._naming.base_of(members[0].name, members, flat.dtype, lengths), tuple(members), start


def _strides(name: str, shape: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a parameter in the flat one; ``None`` where they are those of its shape. Raises ValueError where
    its elements do not fill its memory, of which FSDP1 keeps as many elements as the parameter has."""
    if torch.empty_strided(shape, held, device="meta").is_contiguous():
        return None
    if full_box(shape, held).dims != ((prod(shape), 1, 1),):
        raise ValueError(
            f"parameter {name!r} has strides {held} for shape {shape}: there are gaps or repetitions between its "
            "elements, and FSDP1 keeps others in their place. Give the model a parameter that is contiguous()."
        )
    return held


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
