# SPDX-License-Identifier: Apache-2.0
"""Out-of-place merge on any consecutive part of a weight. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from verl_sync_plugin.lora.delta import Factors, delta_rows
from verl_sync_plugin.lora.weights import LoRAWeight

_ALIGNED = 16  # elements; cuBLAS and the copy kernels are slower on addresses that are not multiples of 16 bytes


class Weight(Protocol):
    """An adapted weight, whoever's adapters they are."""

    @property
    def name(self) -> str:
        """Of the weight, in messages."""

    @property
    def a(self) -> str:
        """Key of the A factor."""

    @property
    def b(self) -> str:
        """Key of the B factor."""

    @property
    def magnitude(self) -> str | None:
        """Key of DoRA's magnitude vector, if any."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Of everything the merge needs."""

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied with."""

    @property
    def plain(self) -> bool:
        """The delta is ``scaling * B @ A`` and nothing else. One that is not is a ``LoRAWeight``."""

    @property
    def transposed(self) -> bool:
        """The weight is stored (in, out)."""

    def columns(self, shape: tuple[int, ...]) -> int:
        """Elements of the weight per row."""


@dataclass(frozen=True)
class Target:
    """Where an adapted weight lies in its base.

    Attributes:
        weight: which one.
        start: its first element in the base.
        shape: its full shape.
    """

    weight: Weight
    start: int
    shape: tuple[int, ...]

    @cached_property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @cached_property
    def columns(self) -> int:
        """Elements per row, see ``LoRAWeight.columns``."""
        return self.weight.columns(self.shape)

    @property
    def scales(self) -> int:
        """Length of DoRA's scale: rows, or columns of a transposed weight."""
        return self.columns if self.weight.transposed else (self.stop - self.start) // self.columns

    def overlaps(self, first: int, count: int) -> bool:
        """Whether elements ``[first, first + count)`` of the base hold any of the weight."""
        return count > 0 and self.start < first + count and first < self.stop


class _Window(NamedTuple):
    """The part of a run that lies in a target, and the rows of the target it touches."""

    low: int
    high: int
    begin: int
    end: int
    skip: int  # elements of row ``begin`` before the part


def _window(target: Target, first: int, count: int) -> _Window:
    columns = target.columns
    low, high = max(first, target.start), min(first + count, target.stop)
    begin = (low - target.start) // columns
    end = -(-(high - target.start) // columns)
    return _Window(low - first, high - first, begin, end, low - target.start - begin * columns)


def merge_run(
    run: torch.Tensor, first: int, target: Target, factors: Factors, scale: torch.Tensor | None = None
) -> None:
    """Adds the delta to the part of a weight that lies in a run, and scales it if it is DoRA's.

    Args:
        run: fp32, 1-D; elements ``[first, first + len(run))`` of the base. Written in place, so give a copy.
        first: see ``run``.
        target: the weight; must overlap the run.
        factors: see ``delta_rows``.
        scale: fp32 of length ``target.scales``: magnitude over norm. ``None`` for plain LoRA.

    Source: ``DoraLinearVariant.merge_safe`` of ``peft.tuners.lora.variants`` for the scale.
    """
    window = _window(target, first, run.numel())
    part = run[window.low : window.high]
    assert isinstance(target.weight, LoRAWeight), "any other is plain"
    delta = delta_rows(target.weight, target.shape, factors, window.begin, window.end)
    part += delta.reshape(-1)[window.skip : window.skip + part.numel()]
    if scale is not None:
        columns = delta.shape[1]
        if target.weight.transposed:
            spread = scale.repeat(window.end - window.begin)
        else:
            spread = scale[window.begin : window.end].repeat_interleave(columns)
        part *= spread[window.skip : window.skip + part.numel()]


@dataclass(frozen=True, slots=True)
class Product:
    """A plain weight's delta on some rows of the memory in which a run is merged.

    Attributes:
        weight: which one.
        offset: of the first row in that memory, in elements.
        shape: rows and columns.
        rows: of the B factor; ``None`` for all of them.
    """

    weight: Weight
    offset: int
    shape: tuple[int, int]
    rows: slice | None


@dataclass(frozen=True, slots=True)
class Steps:
    """How one run is merged. Depends on its place and length only, so it is worked out once.

    Attributes:
        first: its first element in the base.
        count: its elements.
        margin: elements of memory before and behind the run, for the rows that it cuts.
        products: of plain weights.
        others: weights that are left to PEFT.
    """

    first: int
    count: int
    margin: int
    products: tuple[Product, ...]
    others: tuple[Target, ...]


def steps_of(targets: tuple[Target, ...], first: int, count: int) -> Steps:
    """The steps for elements ``[first, first + count)`` of the base that holds these weights."""
    inside = [target for target in targets if target.overlaps(first, count)]
    plain = [target for target in inside if target.weight.plain]
    margin = max((target.columns for target in plain), default=0)
    margin = -(-margin // _ALIGNED) * _ALIGNED
    products = tuple(_product(target, _window(target, first, count), margin) for target in plain)
    return Steps(first, count, margin, products, tuple(target for target in inside if not target.weight.plain))


def _product(target: Target, window: _Window, margin: int) -> Product:
    whole = window.begin == 0 and window.end == target.shape[0]
    count = window.end - window.begin
    rows = None if whole else slice(window.begin, window.end)
    return Product(target.weight, margin + window.low - window.skip, (count, target.columns), rows)


def add_squares(run: torch.Tensor, first: int, target: Target, factors: Factors, sums: torch.Tensor) -> None:
    """Adds the squares of the merged elements in a run to the sums of their rows (columns of a transposed weight).

    Args:
        run: fp32, 1-D; elements ``[first, first + len(run))`` of the base. Overwritten, so give a copy.
        first, target, factors: see ``merge_run``.
        sums: fp32 of length ``target.scales``; added to in place.
    """
    merge_run(run, first, target, factors)
    window = _window(target, first, run.numel())
    part = run[window.low : window.high]
    rows = run.new_zeros((window.end - window.begin, target.columns))
    rows.view(-1)[window.skip : window.skip + part.numel()] = part.square()
    if target.weight.transposed:
        sums += rows.sum(0)
    else:
        sums[window.begin : window.end] += rows.sum(1)
