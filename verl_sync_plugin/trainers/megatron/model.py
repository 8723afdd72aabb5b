# SPDX-License-Identifier: Apache-2.0
"""Finds the weights in the model chunks of a Megatron rank, and where each of them is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class HeldTensor(NamedTuple):
    """One weight of a chunk, by Megatron's name with the rank's own layer and expert numbers; ``place`` is in
    ``ModelTensors.tensors``, and a ``buffer`` keeps its dtype. A module has it in ``home`` under ``attribute``."""

    name: str
    buffer: bool
    place: int
    chunk: int
    home: dict[str, Any]
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.home[self.attribute]
        return tensor


class _Walk:
    """Every weight of the chunks, found by going through all modules."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self.chunks = chunks
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        self._structure = _structure(self._modules)
        self._tied = False  # of tied weights each may be replaced alone
        self.held: list[HeldTensor] = []
        homes: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)  # by identity
        for module in self._modules:
            for home in (module._parameters, module._buffers):
                for attribute, tensor in home.items():
                    homes[id(tensor)].append((home, attribute))
        for number, chunk in enumerate(chunks):
            for name, weight, buffer in held_by(chunk):
                first, *more = homes[id(weight)]
                self._tied = self._tied or bool(more)
                self.held.append(HeldTensor(name, buffer, len(self.held), number, *first))

    def holds(self, chunks: list[torch.nn.Module]) -> bool:
        """True if no module or weight has come, gone or changed its name."""
        same = not self._tied and all(a is b for a, b in zip(chunks, self.chunks, strict=True))
        return same and self._structure == _structure(self._modules)


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
    """The weights of all chunks, wrapped or not. Walks the modules once and later looks where they were: with thousands
    of experts a walk takes as long as moving them. ``tensors`` are as they were when last looked up."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._walk: _Walk | None = None
        self._kinds: list[tuple[str, torch.Size, torch.dtype]] = []
        self._devices: list[torch.device] = []
        self.tensors: list[torch.Tensor] = []

    def look(self) -> tuple[bool, bool]:
        """Looks the tensors up; a failure leaves everything as it was. Returns True, first, if names, shapes or dtypes
        are others than the last time, and second, if any tensor is another object or elsewhere."""
        walk, chunks = self._walk, [unwrapped(chunk) for chunk in self._chunks]
        if walk is None or not walk.holds(chunks):
            walk = _Walk(chunks)
        tensors = [held.home[held.attribute] for held in walk.held]
        kinds = [(held.name, t.shape, t.dtype) for held, t in zip(walk.held, tensors, strict=True)]
        other = kinds != self._kinds
        devices = [tensor.device for tensor in tensors]
        moved = other or devices != self._devices or any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        self._walk, self._kinds, self._devices, self.tensors = walk, kinds, devices, tensors
        return other, moved

    def named(self) -> Iterator[tuple[int, torch.nn.Module, list[HeldTensor]]]:
        """Each chunk's number, the chunk without its wrappers, and its weights, no empty ones."""
        assert self._walk is not None, "look() comes first"
        for number, module in enumerate(self._walk.chunks):
            yield number, module, [held for held in self._walk.held if held.chunk == number and held.tensor.numel()]

    def offloaded(self) -> dict[int, torch.Tensor]:
        """Flat buffers of Megatron's DDP whose content verl has moved to host memory, by identity of the storage."""
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


def held_by(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Everything that is a weight of the HF model, and whether it is a buffer. Of these that is the router's
    ``expert_bias``, which Megatron has in its state dict but not among its parameters."""
    yield from ((name, parameter, False) for name, parameter in module.named_parameters())
    yield from ((name, buffer, True) for name, buffer in module.named_buffers() if "expert_bias" in name)


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
