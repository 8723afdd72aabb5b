"""Out-of-place merge on any consecutive part of a weight. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from verl_sync_plugin.lora.delta import Factors, delta_rows
from verl_sync_plugin.lora.weights import LoRAWeight


@dataclass(frozen=True)
class Target:
    """Where an adapted weight lies in its base.

    Attributes:
        weight: which one.
        start: its first element in the base.
        shape: its full shape.
    """

    weight: LoRAWeight
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
    delta = delta_rows(target.weight, target.shape, factors, window.begin, window.end)
    part += delta.reshape(-1)[window.skip : window.skip + part.numel()]
    if scale is not None:
        columns = delta.shape[1]
        if target.weight.transposed:
            spread = scale.repeat(window.end - window.begin)
        else:
            spread = scale[window.begin : window.end].repeat_interleave(columns)
        part *= spread[window.skip : window.skip + part.numel()]


def add_plain(memory: torch.Tensor, origin: int, first: int, count: int, target: Target, factors: Factors) -> None:
    """What ``merge_run`` does to a plain weight, in one launch.

    PEFT rounds ``B @ A``, then its product with ``scaling``, then the sum; here all three are rounded once, to fp32.

    Args:
        memory: fp32, 1-D; its elements ``[origin, origin + count)`` are the run, written in place. A row that the run
            cuts is multiplied whole, so ``target.columns`` elements before and behind the run are overwritten as well.
        origin: see ``memory``.
        first: the run's first element in the base.
        count: its elements.
        target: must be plain and overlap the run.
        factors: fp32; see ``delta_rows``.
    """
    weight, window = target.weight, _window(target, first, count)
    shape = (window.end - window.begin, target.columns)
    rows = memory.as_strided(shape, (target.columns, 1), origin + window.low - window.skip)
    b = factors[weight.b][window.begin : window.end]
    rows.addmm_(b, factors[weight.a], alpha=weight.layer.scaling[weight.adapter])


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
