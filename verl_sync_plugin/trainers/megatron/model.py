# SPDX-License-Identifier: Apache-2.0
"""Finds the weights in the model chunks of a Megatron rank, and where each of them is."""

from __future__ import annotations

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


class ModelTensors:
    """The weights of all ``chunks``, wrapped or not. Walks the modules once, for with thousands of experts a walk takes
    as long as moving them, and later looks where each module had them: a tensor may be replaced, a module may not.
    ``tensors`` are as they were when last looked up."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self.chunks = chunks
        self._models = [unwrapped(chunk) for chunk in chunks]
        self._held: list[HeldTensor] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._devices: list[torch.device] = []
        self.tensors: list[torch.Tensor] = []
        homes: dict[int, tuple[dict[str, Any], str]] = {}  # by identity
        for module in (module for model in self._models for module in model.modules()):
            for home in (module._parameters, module._buffers):
                for attribute, tensor in home.items():
                    homes.setdefault(id(tensor), (home, attribute))
        for number, model in enumerate(self._models):
            for name, weight, buffer in held_by(model):
                self._held.append(HeldTensor(name, buffer, len(self._held), number, *homes[id(weight)]))

    def find_tensors(self) -> tuple[bool, bool]:
        """Looks the tensors up; a failure leaves everything as it was. Returns True, first, if shapes or dtypes are
        others than the last time, and second, if any tensor is another object or elsewhere."""
        if any(unwrapped(chunk) is not model for chunk, model in zip(self.chunks, self._models, strict=True)):
            raise ValueError("the trainer's Megatron model is another one than in the first sync")
        tensors = [held.home[held.attribute] for held in self._held]
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        other = kinds != self._kinds
        devices = [tensor.device for tensor in tensors]
        moved = other or devices != self._devices or any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        self._kinds, self._devices, self.tensors = kinds, devices, tensors
        return other, moved

    def named(self) -> Iterator[tuple[int, torch.nn.Module, list[HeldTensor]]]:
        """Each chunk's number, the chunk without its wrappers, and its weights, no empty ones."""
        for number, model in enumerate(self._models):
            yield number, model, [held for held in self._held if held.chunk == number and held.tensor.numel()]

    def offloaded(self) -> dict[int, torch.Tensor]:
        """Flat buffers of Megatron's DDP whose content verl has moved to host memory, by identity of the storage."""
        from megatron.core.distributed import DistributedDataParallel

        found = {}
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    data = buffer.param_data
                    if data is not None and data.untyped_storage().size() == 0:
                        found[data.untyped_storage()._cdata] = data
        return found


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's wrappers (DDP, mixed precision)."""
    from verl.utils.megatron_utils import unwrap_model

    module: torch.nn.Module = unwrap_model(chunk)
    return module


def held_by(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields name and tensor of each weight of the HF model, and whether it is a buffer: only the router's
    ``expert_bias`` is, which Megatron's state dict has and its parameters do not."""
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
