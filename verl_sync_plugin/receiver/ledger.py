# SPDX-License-Identifier: Apache-2.0
"""Proves that a sync writes every element of every parameter and persistent buffer of the engine's model.

An engine may skip names it does not know without a word, so what was *sent* proves nothing; the ledger watches what is
*written*. A dispatch mode sees every operation that mutates a tensor; tensors are matched by storage, so tied weights
count as written together.

Limits: writes in other threads (DeepSeek's loader with CPU tensors) and ``param.data = tensor`` rebinding make no
visible operation and count as missing, unless the copy plan's comparison has seen the bytes in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_sync_plugin.receiver.intervals import Region, intervals, region_of, union
from verl_sync_plugin.transport.protocol import Coverage


class Ledger(TorchDispatchMode):
    """Records writes while it is entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        persistent = set(model.state_dict(keep_vars=True))
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._expected = {name: tensor for name, tensor in named if name in persistent and tensor.numel() > 0}
        self._storages = {tensor.untyped_storage()._cdata for tensor in self._expected.values()}
        self._written: dict[int, set[Region]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.note(value)
        return result

    def note(self, value: Any) -> None:
        """Notes the elements of a tensor, or of each of a list, as written."""
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._storages:
                self._written[tensor.untyped_storage()._cdata].add(region_of(tensor))

    def note_bytes(self, found: Iterable[tuple[int, int, int, int]]) -> None:
        """Notes bytes that were seen to be right though no operation was seen to write them (other threads).

        Args:
            found: runs of bytes as address, width, count and bytes from one to the next.
        """
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._expected.values()}
        starts = sorted(held)
        for address, width, count, stride in found:
            index = bisect_right(starts, address) - 1
            if index >= 0 and address < starts[index] + held[starts[index]].nbytes():
                self._written[held[starts[index]]._cdata].add((address, (count, width), (stride, 1), 1))

    def coverage(self) -> Coverage:
        """What was written so far, against what the model holds."""
        written = {storage: intervals(regions) for storage, regions in self._written.items()}
        missing = []
        for name, tensor in self._expected.items():
            covered = 0
            if (found := written.get(tensor.untyped_storage()._cdata)) is not None:
                span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                first = tensor.data_ptr()
                covered = union(found.clamp(first, first + span * tensor.element_size())) // tensor.element_size()
            if covered < tensor.numel():
                missing.append((name, covered, tensor.numel()))
        buffers = [name for name, *_ in missing if not isinstance(self._expected[name], torch.nn.Parameter)]
        return Coverage(expected=len(self._expected), missing=tuple(missing), buffers=tuple(buffers))
