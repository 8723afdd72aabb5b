"""Proves that a sync writes every element of every parameter and persistent buffer of the engine's model.

SGLang skips names it does not know without a word, so what was *sent* proves nothing; the ledger watches what is
*written*. A dispatch mode sees every operation that mutates a tensor; tensors are matched by storage, so tied weights
count as written together.

Limits: writes in other threads (DeepSeek's loader with CPU tensors) and ``param.data = tensor`` rebinding make no
visible operation and count as missing. Regions are told apart by address, shape and strides, and their sizes added
up; models do not write partly overlapping regions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_sync_plugin.transport.protocol import Coverage


class Ledger(TorchDispatchMode):
    """Records writes while it is entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        persistent = set(model.state_dict(keep_vars=True))
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._expected = {name: tensor for name, tensor in named if name in persistent and tensor.numel() > 0}
        self._storages = {tensor.untyped_storage()._cdata for tensor in self._expected.values()}
        self._written: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(value)
        return result

    def _note(self, value: Any) -> None:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._storages:
                region = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
                self._written[tensor.untyped_storage()._cdata][region] = tensor.numel()

    def coverage(self) -> Coverage:
        """What was written so far, against what the model holds."""
        missing = []
        for name, tensor in self._expected.items():
            first = tensor.data_ptr()
            beyond = first + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
            regions = self._written[tensor.untyped_storage()._cdata]
            # Several parameters may be views of one storage: count only regions that begin inside this one
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            beyond = min(beyond, first + span * tensor.element_size())
            written = sum(count for region, count in regions.items() if first <= region[0] < beyond)
            if written < tensor.numel():
                missing.append((name, written, tensor.numel()))
        return Coverage(expected=len(self._expected), missing=tuple(missing))
