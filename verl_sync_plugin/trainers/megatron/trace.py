# SPDX-License-Identifier: Apache-2.0
"""The origin of a tensor's elements, read off a function that only slices, joins and reorders.

A bridge's conversion runs once on meta tensors. Views keep their storage, offset and strides, and the few operations
that make a new storage without computing (``cat``, ``clone``, rows taken by number) are followed by a table: which
element of which input each part of the new storage holds. So no memory is needed however large the tensors are, and
what a function does is known exactly, or it is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import NOTHING

_UNKNOWN = -1
# A table longer than this means a conversion that shuffles single elements of a large weight
_LONGEST_TABLE = 1 << 26


class NotACopyError(ValueError):
    """The function computes new values, or shuffles single elements; its result is no plain copy of its inputs."""


@dataclass(frozen=True)
class _Table:
    """Content of one storage: elements ``[i * grain, (i + 1) * grain)`` are those from ``origin[i]`` on, in the space
    in which all inputs lie one after another, a gap of one element between them so that no run crosses."""

    grain: int
    origin: np.ndarray


class CopyTrace(TorchDispatchMode):
    """A dispatch mode that follows copies between meta tensors, from ``count`` inputs of one shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
        super().__init__()
        self._numel = math.prod(shape)
        self._tables: dict[int, _Table] = {}
        self._alive: list[torch.Tensor] = []  # a storage's identity is reused when it dies
        self.inputs = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(count)]
        for index, tensor in enumerate(self.inputs):
            self._learn(tensor, _Table(max(self._numel, 1), np.array([index * (self._numel + 1)], dtype=np.int64)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._alive.append(tensor)
        if func._schema.is_mutable:
            for tensor in _tensors(args):
                self._tables.pop(_identity(tensor), None)  # overwritten by something that is not followed
        elif func is torch.ops.aten.cat.default:
            self._cat(result, args[0], args[1] if len(args) > 1 else 0)
        elif func in (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default):
            self._cat(result, [args[0]], 0)
        elif func is torch.ops.aten.index.Tensor:
            self._select(result, args[0], args[1])
        return result

    def runs(self, result: torch.Tensor) -> list[tuple[int, Run]]:
        """The origin of the elements of ``result``: numbers of inputs and runs from the flat input to the flat result,
        in ascending order of target. Raises NotACopyError where it is not the inputs alone."""
        grain, origin = self._read(result)
        if not len(origin):
            return []
        first = np.concatenate(([0], np.flatnonzero(np.diff(origin) != grain) + 1, [len(origin)]))
        by_input: dict[int, list[Run]] = {}
        for a, b in pairwise(first):
            number, source = divmod(int(origin[a]), self._numel + 1)
            by_input.setdefault(number, []).append(Run(source, int(a) * grain, int(b - a) * grain))
        found = [(number, run) for number, alike in by_input.items() for run in _repetitions(alike)]
        return sorted(found, key=lambda each: each[1].target)

    def shares(self, result: torch.Tensor, parts: int) -> tuple[tuple[Run, ...], ...]:
        """By input what it contributes to ``result``, ``NOTHING`` where that is nothing; any input is the only part."""
        found: list[list[Run]] = [[] for _ in range(parts)]
        for part, run in self.runs(result):
            found[part if parts > 1 else 0].append(run)
        return tuple(tuple(each) or (NOTHING,) for each in found)

    def _learn(self, tensor: torch.Tensor, table: _Table) -> None:
        self._alive.append(tensor)
        self._tables[_identity(tensor)] = table

    def _cat(self, result: torch.Tensor, parts: list[torch.Tensor], dim: int) -> None:
        if any(part.dtype != result.dtype or _identity(part) not in self._tables for part in parts):
            return  # unknown stays unknown
        writes, position = [], 0
        for part in parts:
            size = part.shape[dim] if part.dim() else 1
            region = result.narrow(dim, position, size) if part.dim() else result
            position += size
            if part.numel():
                writes.append((_addresses(region), self._read(part)))
        if not writes:
            return
        grain = math.gcd(*(math.gcd(length, source[0], _gcd(starts)) for (starts, length), source in writes))
        grain = math.gcd(grain, result.numel())
        _bounded(result.numel() // grain)
        origin = np.full(result.numel() // grain, _UNKNOWN, dtype=np.int64)
        for (starts, length), source in writes:
            places = (starts[:, None] + np.arange(0, length, grain)).reshape(-1) // grain
            origin[places] = (source[1][:, None] + np.arange(0, source[0], grain)).reshape(-1)
        self._learn(result, _Table(grain, origin))

    def _select(self, result: torch.Tensor, source: torch.Tensor, indices: list[torch.Tensor | None]) -> None:
        """``source[rows]``, with the numbers of the rows on the CPU, is the rows one after another."""
        rows = indices[0] if len(indices) == 1 else None
        if rows is not None and rows.dim() == 1 and rows.dtype == torch.int64 and rows.device.type == "cpu":
            self._cat(result, [source.narrow(0, int(row), 1) for row in rows.tolist()], 0)

    def _read(self, tensor: torch.Tensor) -> tuple[int, np.ndarray]:
        """(grain, origin of each grain) in the tensor's own row-major order."""
        table = self._tables.get(_identity(tensor))
        if table is None:
            raise NotACopyError("its values are computed")
        if not tensor.numel():
            return 1, np.empty(0, dtype=np.int64)
        starts, length = _addresses(tensor)
        grain = math.gcd(table.grain, length, _gcd(starts))
        _bounded(len(starts) * (length // grain))
        places = (starts[:, None] + np.arange(0, length, grain)).reshape(-1)
        origin = table.origin[places // table.grain]
        if (origin == _UNKNOWN).any():
            raise NotACopyError("some of its values are computed")
        origin = origin + places % table.grain
        # The same content with the largest grain whose multiples all breaks between runs are
        breaks = np.flatnonzero(np.diff(origin) != grain) + 1
        factor = math.gcd(_gcd(breaks), len(origin))
        return grain * factor, origin[::factor]


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(args: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found


def _bounded(entries: int) -> None:
    if entries > _LONGEST_TABLE:
        raise NotACopyError("its elements are shuffled one by one")


def _gcd(values: np.ndarray) -> int:
    return int(np.gcd.reduce(values)) if len(values) else 0


def _addresses(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """(storage addresses of consecutive runs in row-major order, their length), in elements."""
    length = 1
    outer: list[tuple[int, int]] = []
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if size == 1:
            continue
        if stride == length and not outer:
            length *= size
        else:
            outer.append((size, stride))
    _bounded(tensor.numel() // length)
    starts = np.array([tensor.storage_offset()], dtype=np.int64)
    for size, stride in reversed(outer):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _repetitions(runs: list[Run]) -> list[Run]:
    """Runs of one input, joined while they are equally wide and equally far apart."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and run.width == last.width:
            stride, target_stride = (run.source - last.source) // last.count, (run.target - last.target) // last.count
            next_one = (last.source + last.count * stride, last.target + last.count * target_stride)
            alike = last.count == 1 or (stride, target_stride) == (last.source_stride, last.target_stride)
            if (run.source, run.target) == next_one and stride >= run.width and alike:
                found[-1] = Run(last.source, last.target, run.width, last.count + 1, stride, target_stride)
                continue
        found.append(run)
    return found
