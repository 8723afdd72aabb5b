# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a tensor as a box: which elements of the whole are which of its own. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from verl_sync_plugin.layout.strided import Run


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def box_runs(size: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> tuple[Run, ...]:
    """A contiguous box of ``size`` at ``offset`` in a contiguous tensor ``whole``: from elements of the box to those of
    the tensor.

    Args:
        size, offset, whole: one entry per dimension; all sizes are at least 1.
    """
    strides = strides_of(whole)
    target = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    cut = len(whole)  # from this dimension on the box is one stretch of memory
    while cut > 0 and size[cut - 1] == whole[cut - 1]:
        cut -= 1
    cut = max(cut - 1, 0)
    width = prod(size[cut:])
    if cut == 0:
        return (Run(0, target, width),)
    # Rows of that stretch at one stride: a dimension, and those before it while nothing of it is left out
    first = cut - 1
    while first > 0 and size[first] == whole[first]:
        first -= 1
    count = prod(size[first:cut])
    outer = product(*(range(size[axis]) for axis in range(first)))
    return tuple(
        Run(
            number * count * width,
            target + sum(at * stride for at, stride in zip(place, strides, strict=False)),
            width,
            count,
            width if count > 1 else 0,
            strides[cut - 1] if count > 1 else 0,
        )
        for number, place in enumerate(outer)
    )
