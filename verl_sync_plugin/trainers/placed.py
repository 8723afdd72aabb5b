# SPDX-License-Identifier: Apache-2.0
"""Trainers whose ranks hold boxes of their tensors: DTensors of any placement (TP, EP, FSDP over either), over one or
several meshes, or verl's ``ShardSpec``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_sync_plugin.layout.load_map import box_runs
from verl_sync_plugin.layout.strided import Run, compose
from verl_sync_plugin.layout.tensors import NOTHING, Base, Member, Shard, View
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend, WirePolicy, dtype_name
from verl_sync_plugin.trainers.fsdp2 import cut
from verl_sync_plugin.trainers.joint import JointSource, Part, RankLayout
from verl_sync_plugin.trainers.naming import Naming, Rewrite, hf_views

Export = Iterable[tuple[str, torch.Tensor, Any]]


@dataclass(frozen=True, eq=False)
class Box:
    """One tensor on this rank: the local part, perhaps without elements, at ``offset`` in the ``whole`` shape. A
    ``parameter`` travels in the dtype of parameters, a buffer keeps its own."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor
    rewrite: Rewrite
    parameter: bool = True

    def part(self) -> Part:
        """Raises ValueError for a checkpoint's tensor that is no contiguous part of this one."""
        size, dtype = tuple(self.local.shape), self.local.dtype
        runs = box_runs(size, self.offset, self.whole)
        views = []
        for view in hf_views(Member(self.name, self.whole), dtype, self.rewrite):
            if view.strides is not None:
                raise ValueError(
                    f"tensor {view.name!r} is no contiguous part of {self.name!r}, of which ranks hold parts. "
                    "Gather it with full_tensor() and give it by itself."
                )
            shares = tuple(share for run in runs for share in compose(run, Run(view.start, 0, view.span)))
            views.append(View(view.name, view.shape, 0, view.span, None, shares or (NOTHING,)))
        text, place = f"{dtype_name(dtype)} of shape {self.whole}", (*self.offset, *size)
        return Part(self.name, place, size, dtype_name(dtype), tuple(views), self.whole, text, not self.parameter)


class PlacedSource(JointSource):
    """``boxes`` yields, for one sync, all tensors of which this rank may hold something, in model order, and raises
    ValueError, with its name, for one laid out in no box."""

    def __init__(self, boxes: Callable[[], Iterator[Box]], policy: WirePolicy) -> None:
        super().__init__(policy)
        self._boxes = boxes
        self._now: dict[str, Box] = {}
        self._kinds: list[tuple[object, ...]] = []

    def look(self) -> bool:
        self._now = {box.name: box for box in self._boxes() if box.local.numel()}
        before = self._kinds
        self._kinds = [
            (box.name, box.local.dtype, box.whole, box.local.shape, box.offset) for box in self._now.values()
        ]
        return self._kinds != before

    def read(self, run: str) -> RankLayout:
        everyone = tuple(range(dist.get_world_size()))
        return RankLayout(tuple(box.part() for box in self._now.values()), (everyone,))

    def check_whole(self, parts: Sequence[Part]) -> None:
        """Together the boxes are as large as the whole, so no two of them may overlap."""
        dims = len(parts[0].shape)
        for index, one in enumerate(parts):
            for other in parts[index + 1 :]:
                places = zip(one.place[:dims], one.shape, other.place[:dims], other.shape, strict=True)
                if all(low < at + size and at < low + length for low, length, at, size in places):
                    at = other.place[:dims]
                    raise ValueError(
                        f"the ranks hold boxes that overlap at {at} of parameter {one.name!r} ({one.text})"
                    )

    def shard(self, base: Base, name: str) -> Shard:
        local = self._now[name].local.detach()
        return Shard(base, partial(local.reshape, -1), run=local if local.is_contiguous() else None)

    def release(self) -> None:
        self._now = {}


def simple(tensors: Iterable[torch.Tensor]) -> bool:
    """True if all DTensors are cut as ``trainers/fsdp2.py`` reads them, over one mesh."""
    cuts = [(cut(tensor), tensor.device_mesh) for tensor in tensors if isinstance(tensor, DTensor)]
    return all(each is not None for each, _ in cuts) and len({mesh for each, mesh in cuts if each}) <= 1


def place_of(
    name: str, whole: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and offset of this rank's box by DTensor placements, any mix of ``Shard`` and ``Replicate``. Raises
    ValueError, with the remedy, where the local parts are sums (``Partial``) or no boxes."""
    for number, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"parameter {name!r} has placements {placements}: the ranks hold parts of a sum. Redistribute it to "
                "Replicate() or Shard(…) first."
            )
        factor = getattr(placement, "split_factor", 1)
        if factor == 1:
            continue
        same = [at for at, other in enumerate(placements) if getattr(other, "dim", None) == placement.dim]
        inner = prod(mesh.size(at) for at in same if at > number)
        if factor != inner or whole[placement.dim] % prod(mesh.size(at) for at in same):
            raise ValueError(
                f"parameter {name!r} of shape {whole} has placements {placements}: a strided shard that is no box. "
                "Use an even one, as fully_shard makes it over tensor parallelism, or redistribute it."
            )
    size, offset = compute_local_shape_and_global_offset(torch.Size(whole), mesh, list(placements))
    return tuple(size), tuple(offset)


def box_of(name: str, tensor: torch.Tensor, rewrite: Rewrite, parameter: bool = True) -> Box:
    """This rank's part of a tensor or DTensor. Raises ValueError as ``place_of``, and where it holds another part."""
    whole = tuple(tensor.shape)
    offset, local = (0,) * len(whole), tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        if tensor.device_mesh.get_coordinate() is None:
            local = local.reshape(-1)[:0]
        else:
            size, offset = place_of(name, whole, tensor.device_mesh, tensor.placements)
            if tuple(local.shape) != size:
                raise ValueError(f"parameter {name!r}: this rank holds shape {tuple(local.shape)}, not {size}")
    return Box(name, whole, offset, local, rewrite, parameter)


def state_boxes(
    state: Mapping[str, torch.Tensor], naming: Naming, parameters: Container[str] | None = None
) -> Iterator[Box]:
    """Boxes of a state dict whose DTensors have any placements. ``parameters``: see ``StateDictSource``."""
    for name, tensor in state.items():
        if name not in naming.unsaved:
            yield box_of(name, tensor, naming.rewrite, parameters is None or name in parameters)


def spec_boxes(export: Callable[[], Export]) -> Iterator[Box]:
    """Boxes of what a training engine of verl exports as ``(name, local part, ShardSpec)``. verl makes that export for
    each sync, in bf16, so meanwhile a rank holds its parts twice."""
    for name, local, spec in export():
        whole = tuple(spec.full_shape)
        size, offset = whole, (0,) * len(whole)
        if spec.place is None and spec.mesh is not None:
            size, offset = place_of(name, whole, spec.mesh, tuple(spec.placements))
        elif isinstance(spec.place, int) and (spec.place or local.numel() != prod(whole)):
            raise ValueError(
                f"parameter {name!r}: verl's ShardSpec places a flat part at {spec.place}, which is no box"
            )
        elif spec.place:
            block = spec.place
            size, offset, whole = map(tuple, (block.local_shape, block.global_offset, block.full_shape))
        yield Box(name, whole, offset, local.detach().reshape(size), partial(_products, spec))


def _products(spec: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors of a whole one: itself, a slot for every row, or what verl's converter slices."""
    for name, whole in pairs:
        if spec.to_hf_chunk is not None:
            yield from spec.to_hf_chunk(0, whole)
        elif spec.hf_slots is not None:
            yield from ((slot, whole[row]) for row, (slot, _) in enumerate(spec.hf_slots))
        else:
            yield name, whole


class ShardSpecTrainer(TrainerBackend):
    """Any training engine of verl with ``get_per_tensor_param_shard``: torchtitan, veomni, and FSDP2 itself."""

    def open_source(self) -> ParameterSource:
        if not hasattr(self.engine, "get_per_tensor_param_shard"):
            raise ValueError(f"{type(self.engine).__name__} has no get_per_tensor_param_shard to read")
        export = self.engine.get_per_tensor_param_shard
        return PlacedSource(lambda: spec_boxes(lambda: export()[0]), self.policy)
