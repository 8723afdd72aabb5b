# SPDX-License-Identifier: Apache-2.0
"""The bytes of strided tensors as intervals of addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Region = tuple[int, tuple[int, ...], tuple[int, ...], int]  # address, shape, strides, bytes per element


def region_of(tensor: torch.Tensor) -> Region:
    """Where the elements of a tensor lie; keeps nothing of it alive."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()


def intervals(regions: Iterable[Region]) -> torch.Tensor:
    """The bytes of strided regions: int64 of shape ``(n, 2)``, first and one past the last address of each run."""
    plain: list[tuple[int, int]] = []  # most regions are one run; a tensor for each took most of the time
    parts = []
    for address, shape, strides, itemsize in regions:
        run = 1
        outer: list[tuple[int, int]] = []
        for stride, size in sorted((st, sz) for st, sz in zip(strides, shape, strict=True) if sz > 1 and st > 0):
            if stride == run and not outer:
                run *= size
            else:
                outer.append((stride, size))
        if 0 in shape:
            continue
        if not outer:
            plain.append((address, address + run * itemsize))
            continue
        starts = torch.zeros(1, dtype=torch.int64)
        for stride, size in outer:
            starts = (starts[:, None] + torch.arange(size) * stride).flatten()
        starts = address + starts * itemsize
        parts.append(torch.stack((starts, starts + run * itemsize), dim=1))
    return torch.cat([torch.tensor(plain, dtype=torch.int64).reshape(-1, 2), *parts])


def union(found: torch.Tensor) -> int:
    """Length of the union of ``(n, 2)`` intervals."""
    if not len(found):
        return 0
    first, end = found[found[:, 0].argsort()].unbind(1)
    reached = torch.cummax(end, dim=0).values
    before = torch.cat((first[:1], reached[:-1]))
    return int((reached - torch.maximum(first, before)).clamp(min=0).sum())


def meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share any byte. Costs little where the ranges that they span are disjoint."""
    (low, high), (other_low, other_high) = bounds(one), bounds(other)
    if high <= other_low or other_high <= low:
        return False
    mine, others = intervals([region_of(one)]), intervals([region_of(other)])
    return union(torch.cat((mine, others))) < union(mine) + union(others)


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor and one past its last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + (span * tensor.element_size() if tensor.numel() else 0)
