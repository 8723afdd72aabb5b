# SPDX-License-Identifier: Apache-2.0
"""Finds the weights in the model chunks of a Megatron rank, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Held(NamedTuple):
    """One weight of a chunk, by Megatron's name with the rank's own layer and expert numbers; ``place`` is in
    ``ModelTensors.tensors``, and a ``buffer`` keeps its dtype."""

    name: str
    tensor: torch.Tensor
    buffer: bool
    place: int = -1


class _Slot(NamedTuple):
    """A module's place for a weight."""

    chunk: int
    name: str
    buffer: bool
    place: dict[str, Any]
    attribute: str

    def tensor(self) -> torch.Tensor:
        found = self.place[self.attribute]
        assert isinstance(found, torch.Tensor)
        return found


class _Walk:
    """Every weight of the chunks, found by going through all modules; holds as long as ``structure`` does."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self.chunks = chunks
        self.modules = [module for chunk in chunks for module in chunk.modules()]
        self.structure = _structure(self.modules)
        places: dict[int, tuple[dict[str, Any], str]] = {}  # by identity, each tensor's first place
        several: set[int] = set()
        for module in self.modules:
            for place in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
                for attribute, tensor in place.items():
                    if id(tensor) in places:
                        several.add(id(tensor))
                    elif tensor is not None:
                        places[id(tensor)] = (place, attribute)
        self.slots: list[_Slot] = []
        self.empty: list[_Slot] = []
        for number, chunk in enumerate(chunks):
            for held in held_by(chunk):
                slot = _Slot(number, held.name, held.buffer, *places[id(held.tensor)])
                (self.slots if held.tensor.numel() else self.empty).append(slot)
        self.tied = any(id(slot.tensor()) in several for slot in (*self.slots, *self.empty))

    def look(self) -> tuple[list[torch.Tensor], list[tuple[str, torch.Size, torch.dtype]]]:
        tensors = [slot.place[slot.attribute] for slot in self.slots]
        return tensors, [(slot.name, t.shape, t.dtype) for slot, t in zip(self.slots, tensors, strict=True)]


def _structure(modules: list[torch.nn.Module]) -> list[object]:
    """All modules and what each holds, by name; cheap to compare."""
    return [
        (
            list(held["_modules"].items()),
            [name for name, tensor in held["_parameters"].items() if tensor is not None],
            [name for name, tensor in held["_buffers"].items() if tensor is not None],
        )
        for held in (module.__dict__ for module in modules)
    ]


class ModelTensors:
    """The weights of all chunks, wrapped or not. Walks the modules once; later it looks where they were, as long as no
    module or weight has come, gone or changed its name: with thousands of experts a walk takes as long as moving them.
    ``tensors`` are in the order of ``named``, as they were when last looked up."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._walk: _Walk | None = None
        self._kinds: list[tuple[str, torch.Size, torch.dtype]] = []
        self.tensors: list[torch.Tensor] = []

    def look(self) -> tuple[bool, bool]:
        """Looks the tensors up; a failure leaves everything as it was. Returns True, first, if names, shapes or dtypes
        are others than the last time, and second, if any tensor is another object."""
        walk = self._walk
        if walk is None or self._stale(walk):
            walk = _Walk([unwrapped(chunk) for chunk in self._chunks])
        tensors, kinds = walk.look()
        if walk is self._walk and kinds != self._kinds:
            walk = _Walk(walk.chunks)  # one may be empty now, and then does not count
            tensors, kinds = walk.look()
        other = kinds != self._kinds
        moved = other or any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        self._walk, self._kinds, self.tensors = walk, kinds, tensors
        return other, moved

    def _stale(self, walk: _Walk) -> bool:
        if walk.tied or any(unwrapped(a) is not b for a, b in zip(self._chunks, walk.chunks, strict=True)):
            return True  # of tied weights each may be replaced alone
        return walk.structure != _structure(walk.modules) or any(slot.tensor().numel() for slot in walk.empty)

    def named(self) -> Iterator[tuple[int, torch.nn.Module, list[Held]]]:
        """Each chunk's number, the chunk without its wrappers, and what it held when it was last looked at."""
        assert self._walk is not None, "look() comes first"
        found: list[list[Held]] = [[] for _ in self._walk.chunks]
        for place, (slot, tensor) in enumerate(zip(self._walk.slots, self.tensors, strict=True)):
            found[slot.chunk].append(Held(slot.name, tensor, slot.buffer, place))
        for number, module in enumerate(self._walk.chunks):
            yield number, module, found[number]

    def offloaded(self) -> dict[int, torch.Tensor]:
        """The flat buffers, in which Megatron's DDP keeps parameters, whose content verl has moved to host memory; by
        the identity of the storage."""
        from megatron.core.distributed import DistributedDataParallel

        found = {}
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel):
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    data = buffer.param_data
                    if data is not None and data.untyped_storage().size() == 0:
                        found[data.untyped_storage()._cdata] = data
        return found


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's wrappers (DDP, mixed precision)."""
    from verl.utils.megatron_utils import unwrap_model

    module = unwrap_model(chunk)
    assert isinstance(module, torch.nn.Module)
    return module


def held_by(module: torch.nn.Module) -> Iterator[Held]:
    """Everything that is a weight of the HF model, empty ones too. Of the buffers that is the router's ``expert_bias``,
    which Megatron has in its state dict but not among its parameters."""
    for name, parameter in module.named_parameters():
        yield Held(name, parameter, False)
    for name, buffer in module.named_buffers():
        if "expert_bias" in name:
            yield Held(name, buffer, True)


def flat(tensor: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
    """The elements of a parameter; ``home`` is the offloaded flat buffer it lives in, if it does."""
    data = tensor.detach()
    if home is None:
        return data.reshape(-1)
    # verl's offloading frees the storage and keeps its content in ``cpu_data``; views keep their place in it
    first = data.storage_offset() - home.storage_offset()
    held = home.cpu_data  # type: ignore[attr-defined]
    assert isinstance(held, torch.Tensor) and data.is_contiguous()
    return held.reshape(-1)[first : first + data.numel()]
