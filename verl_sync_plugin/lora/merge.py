# SPDX-License-Identifier: Apache-2.0
"""LoRA merged out of place into any consecutive part of a weight, in fp32.

Every delta is ``scaling * left @ right``, of matrices that PEFT's factors are or hold, so it is one product on the rows
that a part touches. PEFT rounds ``B @ A``, then its product with ``scaling``, then the sum; here all three are rounded
once, to fp32, in one launch. Where the trainer allows TF32, factors are rounded to it first. The base weight is never
written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_sync_plugin.lora.peft import Weight

Factors = Mapping[str, torch.Tensor]
_ALIGNED = 16  # elements; cuBLAS and the copy kernels are slower on addresses that are not multiples of 16 bytes


@dataclass(frozen=True)
class Target:
    """A matrix of an adapted weight, row-major from element ``start`` of a base on. ``number``: which of the matrices
    that are fused into the weight."""

    weight: Weight
    number: int
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


def targets_of(weight: Weight, shape: tuple[int, ...]) -> list[Target]:
    """The matrices of a weight of this whole ``shape``."""
    size, columns = math.prod(shape) // weight.matrices, shape[-1]
    return [Target(weight, number, number * size, size // columns, columns) for number in range(weight.matrices)]


@dataclass(frozen=True, slots=True)
class Product:
    """The delta on rows ``[begin, end)`` of a matrix, which lie from ``offset`` on in the memory where a run is
    merged."""

    target: Target
    begin: int
    end: int
    offset: int


Steps = tuple[int, tuple[Product, ...]]


def steps_of(targets: Sequence[Target], first: int, count: int) -> Steps:
    """The merge of elements ``[first, first + count)`` of the base that holds these matrices: the margin of memory on
    both sides for rows that it cuts, and the products."""
    inside = [target for target in targets if max(first, target.start) < min(first + count, target.stop)]
    margin = -(-max((target.columns for target in inside), default=0) // _ALIGNED) * _ALIGNED
    products = []
    for target in inside:
        low, high = max(first, target.start) - target.start, min(first + count, target.stop) - target.start
        begin, end = low // target.columns, -(-high // target.columns)
        products.append(Product(target, begin, end, margin + target.start + begin * target.columns - first))
    return margin, tuple(products)


class Scratch:
    """The fp32 memory for merging on a device, kept from run to run: a run is read before the next overwrites it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.release()

    def release(self) -> None:
        self._memory = torch.empty(0)
        self._views: dict[tuple[int, ...], torch.Tensor] = {}  # a model has few shapes and many weights of each

    def merge(self, run: torch.Tensor, steps: Steps, factors: Factors) -> torch.Tensor:
        """Returns a run, 1-D and on the device, with the deltas of all the weights in it added, in fp32; the next call
        overwrites it. Factors are whole and fp32, by state-dict key. A row that the run cuts is multiplied whole, over
        the margins next to the run."""
        margin, products = steps
        needed = run.numel() + 2 * margin
        if self._memory.numel() < needed:
            self.release()  # before more is taken
            with torch.inference_mode(False):  # else it could not be written outside
                self._memory = torch.empty(needed, dtype=torch.float32, device=self._device)
        merged = self._view(margin, run.numel())
        merged.copy_(run)
        for product in products:
            left, right = product.target.weight.product(factors, product.target.number)
            if product.end - product.begin < product.target.rows:
                left = left[product.begin : product.end]
            rows = self._view(product.offset, product.end - product.begin, product.target.columns)
            rows.addmm_(left, right, alpha=product.target.weight.scaling)
        return merged

    def _view(self, offset: int, *shape: int) -> torch.Tensor:
        view = self._views.get((offset, *shape))
        if view is None:
            view = self._memory[offset : offset + math.prod(shape)].view(shape)
            self._views[offset, *shape] = view
        return view
