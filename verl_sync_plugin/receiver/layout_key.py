# SPDX-License-Identifier: Apache-2.0
"""Whether a model's parameters and buffers are where they were."""

from __future__ import annotations

from verl_sync_plugin.receiver.engine_model import EngineModel

Layout = tuple[tuple[object, ...], ...]


class LayoutKey:
    """Where all parameters and buffers of a model lie, and what the engine adds to that. ``param.data = tensor`` makes
    no operation, so this is compared at every sync; the walk over modules is done anew only where one was replaced."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._walk()

    def _walk(self) -> None:
        self._modules = list(self._model.module.modules())
        self._children = self._children_now()

    def _children_now(self) -> list[object]:
        return [child for module in self._modules for child in module._modules.values()]

    def now(self) -> Layout:
        """The layout at this moment; equal to another as long as nothing has moved."""
        known = self._children
        if len(found := self._children_now()) != len(known) or any(
            a is not b for a, b in zip(found, known, strict=True)
        ):
            self._walk()
        tensors = tuple(
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for module in self._modules
            for owned in (module._parameters, module._buffers)
            for tensor in owned.values()
            if tensor is not None
        )
        return (self._model.layout_token(), *tensors)
