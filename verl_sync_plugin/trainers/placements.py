# SPDX-License-Identifier: Apache-2.0
"""Which box of a tensor a rank has, by DTensor placements or by verl's ``ShardSpec``; and what reads such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.trainers.naming import Rewrite
from verl_sync_plugin.trainers.placed import Held, PlacedSource
from verl_sync_plugin.trainers.wire import WirePolicy

Place = tuple[tuple[int, ...], tuple[int, ...]]  # size and offset
Export = Iterable[tuple[str, torch.Tensor, Any]]


def simple(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all DTensors are cut along dimension 0 alone, over the last dimension of one mesh, as FSDP2 and HSDP do:
    what ``trainers/dtensors.py`` reads."""
    meshes = set()
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        *outer, last = tensor.placements
        cut = type(last) is ShardPlacement and last.dim == 0
        if not all(placement.is_replicate() for placement in outer) or not (cut or last.is_replicate()):
            return False
        if cut:
            meshes.add(tensor.device_mesh)
    return len(meshes) <= 1


def place_of(name: str, whole: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Place:
    """This rank's box by DTensor placements: any mix of ``Shard`` and ``Replicate`` over any mesh dimensions.

    Raises:
        ValueError: the local parts are sums (``Partial``) or no boxes; names parameter, placements and remedy.
    """
    for number, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"parameter {name!r} has placements {placements}: the ranks hold parts of a sum. Redistribute it to "
                "Replicate() or Shard(…) first."
            )
        factor = getattr(placement, "split_factor", 1)
        if factor == 1:
            continue
        cuts = [mesh.size(at) for at, other in enumerate(placements) if getattr(other, "dim", None) == placement.dim]
        inner = 1
        for at in range(number + 1, len(placements)):
            inner *= mesh.size(at) if getattr(placements[at], "dim", None) == placement.dim else 1
        if factor != inner or whole[placement.dim] % int(torch.tensor(cuts).prod()):
            raise ValueError(
                f"parameter {name!r} of shape {whole} has placements {placements}: a strided shard that is no box. "
                "Use an even one, as fully_shard makes it over tensor parallelism, or redistribute it."
            )
    size, offset = compute_local_shape_and_global_offset(torch.Size(whole), mesh, list(placements))
    return tuple(size), tuple(offset)


def held_of(name: str, tensor: torch.Tensor, rewrite: Rewrite, parameter: bool = True) -> Held:
    """What this rank holds of a tensor or DTensor.

    Raises:
        ValueError: see ``place_of``, or torch holds another part than the placements say.
    """
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(name, whole, (0,) * len(whole), tensor, rewrite, parameter)
    local = tensor.to_local().detach()
    if tensor.device_mesh.get_coordinate() is None:
        return Held(name, whole, (0,) * len(whole), local.reshape(-1)[:0], rewrite, parameter)
    size, offset = place_of(name, whole, tensor.device_mesh, tensor.placements)
    if tuple(local.shape) != size:
        raise ValueError(f"parameter {name!r}: this rank holds shape {tuple(local.shape)}, not {size}")
    return Held(name, whole, offset, local, rewrite, parameter)


class PlacedStateSource(PlacedSource):
    """Reads a state dict whose DTensors have any placements.

    Args:
        given: the state dict of the sync under way, by the trainer's names.
        policy: wire dtypes.
        rewrite: verl's stream rewriting.
        unsaved: second names of tied parameters, see ``naming.saved_names``.
        buffers: names of buffers, which keep their dtype.
    """

    def __init__(
        self,
        given: Callable[[], Mapping[str, torch.Tensor]],
        policy: WirePolicy,
        rewrite: Rewrite,
        unsaved: frozenset[str] = frozenset(),
        buffers: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(policy)
        self._given = given
        self._rewrite = rewrite
        self._unsaved = unsaved
        self._buffers = buffers

    def held(self) -> Iterator[Held]:
        for name, tensor in self._given().items():
            if name not in self._unsaved:
                yield held_of(name, tensor, self._rewrite, name not in self._buffers)


class ShardSpecSource(PlacedSource):
    """Reads what a training engine of verl exports as ``(name, local part, ShardSpec)``.

    verl makes that export anew each time, in bf16, so for the time of a sync a rank holds its parts twice.

    Args:
        export: of the engine's ``get_per_tensor_param_shard``.
        policy: wire dtypes.
    """

    def __init__(self, export: Callable[[], Export], policy: WirePolicy) -> None:
        super().__init__(policy)
        self._export = export

    def held(self) -> Iterator[Held]:
        for name, local, spec in self._export():
            size, offset, whole = _place_of_spec(name, local, spec)
            yield Held(name, whole, offset, local.detach().reshape(size), _products(spec))


def _place_of_spec(
    name: str, local: torch.Tensor, spec: Any
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Size, offset, and shape of the whole."""
    whole = tuple(spec.full_shape)
    if spec.place is None and spec.mesh is not None:
        return *place_of(name, whole, spec.mesh, tuple(spec.placements)), whole
    if spec.place is None or (spec.place == 0 and local.numel() == torch.Size(whole).numel()):
        return whole, (0,) * len(whole), whole
    if isinstance(spec.place, int):
        raise ValueError(f"parameter {name!r}: verl's ShardSpec places a flat part at {spec.place}, which is no box")
    return tuple(spec.place.local_shape), tuple(spec.place.global_offset), tuple(spec.place.full_shape)


def _products(spec: Any) -> Rewrite:
    """The checkpoint's tensors of a whole one: itself, a slot for every row, or what verl's converter slices."""

    def rewrite(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, whole in pairs:
            if spec.to_hf_chunk is not None:
                yield from spec.to_hf_chunk(0, whole)
            elif spec.hf_slots is not None:
                for row, (slot, _) in enumerate(spec.hf_slots):
                    yield slot, whole[row]
            else:
                yield name, whole

    return rewrite


class ShardSpecTrainer(TrainerBackend):
    """Any training engine of verl with ``get_per_tensor_param_shard``: torchtitan, veomni, and FSDP2 itself."""

    def open_source(self) -> ParameterSource:
        """See ``TrainerBackend``."""
        if not hasattr(self.engine, "get_per_tensor_param_shard"):
            raise ValueError(f"{type(self.engine).__name__} has no get_per_tensor_param_shard to read")
        return ShardSpecSource(self._export, self.policy)

    def _export(self) -> Export:
        stream, _ = self.engine.get_per_tensor_param_shard()
        return stream
