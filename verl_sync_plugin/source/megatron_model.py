# SPDX-License-Identifier: Apache-2.0
"""What the model chunks of a Megatron rank hold, and where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Held(NamedTuple):
    """One weight of a chunk.

    Attributes:
        name: Megatron's, with the rank's own layer and expert numbers.
        buffer: a persistent buffer, which keeps its dtype.
    """

    name: str
    tensor: torch.Tensor
    buffer: bool


class ModelTensors:
    """The weights of all chunks. Walks the modules once; later it looks where they were, as long as no module has come,
    gone or been replaced: with thousands of experts a walk takes as long as moving them.

    Args:
        chunks: Megatron's model chunks, wrapped or not.

    Attributes:
        modules: the chunks without Megatron's wrappers.
        tensors: of all chunks, in the order of ``named``.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self.modules: list[torch.nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self._walked: list[torch.nn.Module] = []
        self._structure: list[object] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._empty: list[tuple[dict[str, Any], str]] = []
        self._names: list[str] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    def look(self) -> tuple[bool, bool]:
        """Looks the tensors up.

        Returns:
            Whether names, shapes or dtypes are others than the last time; whether any tensor is another object.
        """
        names, known, tensors = self._names, self._kinds, self.tensors
        if self._stale():
            self._walk()
        self._look_at_slots()
        if names == self._names and known != self._kinds:
            self._walk()  # one may be empty now, and then does not count
            self._look_at_slots()
        other = names != self._names or known != self._kinds
        moved = other or any(a is not b for a, b in zip(tensors, self.tensors, strict=True))
        return other, moved

    def _stale(self) -> bool:
        if not self._walked or self._structure != _structure(self._walked):
            return True
        return any(place[attribute].numel() for place, attribute in self._empty)

    def _look_at_slots(self) -> None:
        self.tensors = [place[attribute] for place, attribute in self._slots]
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in self.tensors]

    def _walk(self) -> None:
        self.modules = [unwrapped(chunk) for chunk in self._chunks]
        self._walked = [module for chunk in self.modules for module in chunk.modules()]
        self._structure = _structure(self._walked)
        places = {
            id(tensor): (place, attribute)
            for module in self._walked
            for place in (module.__dict__["_parameters"], module.__dict__["_buffers"])
            for attribute, tensor in place.items()
        }
        found = [held for module in self.modules for held in held_by(module)]
        self._names = [held.name for held in found if held.tensor.numel()]
        self._slots = [places[id(held.tensor)] for held in found if held.tensor.numel()]
        self._empty = [places[id(held.tensor)] for held in found if not held.tensor.numel()]

    def named(self) -> Iterator[tuple[torch.nn.Module, list[Held]]]:
        """Each chunk without its wrappers, and what it holds."""
        for module in self.modules:
            yield module, [held for held in held_by(module) if held.tensor.numel()]

    def offloaded(self) -> dict[int, torch.Tensor]:
        """Megatron's flat parameter buffers whose content verl has moved to host memory, by the identity of the
        storage."""
        found = {}
        for chunk in self._chunks:
            for buffer in _parameter_buffers(chunk):
                data = buffer.param_data
                if data is not None and data.untyped_storage().size() == 0:
                    found[data.untyped_storage()._cdata] = data
        return found


def _structure(modules: list[torch.nn.Module]) -> list[object]:
    """Which modules there are and how much each holds; cheap to compare."""
    return [
        (held["_modules"].copy(), len(held["_parameters"]), len(held["_buffers"]))
        for held in (module.__dict__ for module in modules)
    ]


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's wrappers (DDP, mixed precision)."""
    from verl.utils.megatron_utils import unwrap_model

    module = unwrap_model(chunk)
    assert isinstance(module, torch.nn.Module)
    return module


def held_by(module: torch.nn.Module) -> Iterator[Held]:
    """Everything that is a weight of the HF model, empty ones too.

    Of the buffers that is the router's ``expert_bias``, as in mbridge's own export; Megatron has it in its state dict
    but not among its parameters.
    """
    for name, parameter in module.named_parameters():
        yield Held(name, parameter, False)
    for name, buffer in module.named_buffers():
        if "expert_bias" in name:
            yield Held(name, buffer, True)


def _parameter_buffers(chunk: torch.nn.Module) -> list[Any]:
    """The flat buffers in which Megatron's DDP keeps a chunk's parameters."""
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel):
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


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
