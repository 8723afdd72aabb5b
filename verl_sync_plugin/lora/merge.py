# SPDX-License-Identifier: Apache-2.0
"""LoRA merged out of place into any consecutive part of a weight, in fp32.

A plain delta, ``scaling * B @ A``, is one product on the rows that the part touches. Any other is PEFT's own
arithmetic: ``get_delta_weight`` of its layers, on a stand-in of the layer that holds only the rows asked for. So
scaling, rsLoRA, rank and alpha patterns follow PEFT, and the base weight is never written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from verl_sync_plugin.lora.peft import LoRAWeight, Weight

Factors = Mapping[str, torch.Tensor]
_ALIGNED = 16  # elements; cuBLAS and the copy kernels are slower on addresses that are not multiples of 16 bytes
_NOTHING = nullcontext()


class _Window(NamedTuple):
    """The part ``[low, high)`` of a run that lies in a target, and the rows ``[begin, end)`` of the target it touches;
    ``skip`` elements of the first lie before the part."""

    low: int
    high: int
    begin: int
    end: int
    skip: int


@dataclass(frozen=True)
class Target:
    """An adapted weight in its base: ``start`` is its first element there, ``shape`` its full shape."""

    weight: Weight
    start: int
    shape: tuple[int, ...]

    @cached_property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @cached_property
    def columns(self) -> int:
        return self.weight.columns(self.shape)

    @property
    def scales(self) -> int:
        """Length of DoRA's scale: rows, or columns of a transposed weight."""
        return self.columns if self.weight.transposed else (self.stop - self.start) // self.columns

    def overlaps(self, first: int, count: int) -> bool:
        """True if elements ``[first, first + count)`` of the base hold any of the weight."""
        return count > 0 and self.start < first + count and first < self.stop

    def window(self, first: int, count: int) -> _Window:
        low, high = max(first, self.start), min(first + count, self.stop)
        begin, end = (low - self.start) // self.columns, -(-(high - self.start) // self.columns)
        return _Window(low - first, high - first, begin, end, low - self.start - begin * self.columns)


def delta_rows(weight: LoRAWeight, shape: tuple[int, ...], factors: Factors, begin: int, end: int) -> torch.Tensor:
    """Rows ``[begin, end)`` of the delta that PEFT would add to a weight of this whole ``shape``, fp32 of shape ``(end
    - begin, weight.columns(shape))``. A row is what lies under one index of the first dimension; for a linear weight of
    more than two dimensions, of all but the last.

    ``factors`` are whole, by state-dict key: A ``(r, in)``, B ``(out, r)``; of an embedding ``(r, num_embeddings)`` and
    ``(embedding_dim, r)``; of fused experts ``(E * r, in)`` and ``(out, r * E)``; of a convolution ``(r, in, *kernel)``
    and ``(out, r, 1, ...)``; of a bias only B, ``(out,)``.

    Source: ``get_delta_weight`` in ``peft.tuners.lora.layer``, and the handling of ``lora_bias`` in ``Linear.merge``.
    """
    b = factors[weight.b].float()
    if weight.kind == "bias":
        return (b[begin:end] * weight.scaling).unsqueeze(1)
    a = factors[weight.a].float()
    if weight.kind == "experts":
        delta = _experts(weight, a, b, begin, end)
    elif weight.kind == "conv":
        # No kernel size: PEFT's special case for 1x1 kernels gives the same but cannot do three dimensions
        base = SimpleNamespace(weight=SimpleNamespace(size=lambda: ()), groups=1)
        delta = _pefts(weight, a, b[begin:end], get_base_layer=lambda: base, conv_fn=weight.layer.conv_fn)
    elif weight.transposed:
        delta = _pefts(weight, a[:, begin:end], b, fan_in_fan_out=True)
    else:
        delta = _pefts(weight, a, b[begin:end], fan_in_fan_out=False)
    return delta.reshape(end - begin, weight.columns(shape))


def _experts(weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The delta of experts ``[begin, end)``: PEFT keeps A expert by expert, but B rank by rank."""
    experts, count = weight.layer.num_experts, end - begin
    rank = a.shape[0] // experts
    a = a[begin * rank : end * rank]
    b = b.reshape(b.shape[0], rank, experts)[:, :, begin:end].reshape(b.shape[0], rank * count)
    swapped = weight.layer._did_swap_in_out_features
    # PEFT takes one expert for a linear layer, whose delta is (out, in)
    return _pefts(
        weight,
        a,
        b,
        num_experts=count,
        fan_in_fan_out=count == 1 and not swapped,
        _did_swap_in_out_features=swapped,
        get_param=lambda: SimpleNamespace(dtype=a.dtype, device=a.device),
    )


def _pefts(weight: LoRAWeight, a: torch.Tensor, b: torch.Tensor, **held: Any) -> torch.Tensor:
    """The delta that ``get_delta_weight`` of the layer's class computes from these factors."""
    adapter, layer = weight.adapter, type(weight.layer)
    if weight.kind == "linear":
        # A wrapped 2-D parameter is a linear layer to PEFT
        from peft.tuners.lora import Linear as layer
    stand_in = SimpleNamespace(
        scaling=weight.layer.scaling,
        lora_A={adapter: SimpleNamespace(weight=a)},
        lora_B={adapter: SimpleNamespace(weight=b)},
        lora_embedding_A={adapter: a},
        lora_embedding_B={adapter: b},
        **held,
    )
    return layer.get_delta_weight(stand_in, adapter)


def merge_run(
    run: torch.Tensor, first: int, target: Target, factors: Factors, scale: torch.Tensor | None = None
) -> None:
    """Adds the delta to the part of a weight that lies in a run, in place. ``run`` is fp32, 1-D, elements ``[first,
    first + len(run))`` of the base, and overlaps the target. ``scale`` is DoRA's magnitude over norm, fp32 of length
    ``target.scales``.

    Source: ``DoraLinearVariant.merge_safe`` of ``peft.tuners.lora.variants`` for the scale.
    """
    low, high, begin, end, skip = target.window(first, run.numel())
    part, inside = run[low:high], slice(skip, skip + high - low)
    assert isinstance(target.weight, LoRAWeight), "any other is plain"
    delta = delta_rows(target.weight, target.shape, factors, begin, end)
    part += delta.reshape(-1)[inside]
    if scale is not None:
        across = target.weight.transposed
        spread = scale.repeat(end - begin) if across else scale[begin:end].repeat_interleave(delta.shape[1])
        part *= spread[inside]


def add_squares(run: torch.Tensor, first: int, target: Target, factors: Factors, sums: torch.Tensor) -> None:
    """Adds the squares of the merged elements in a run to ``sums`` by row (by column of a transposed weight), fp32 of
    length ``target.scales``. ``run``, see ``merge_run``, is overwritten."""
    merge_run(run, first, target, factors)
    low, high, begin, end, skip = target.window(first, run.numel())
    rows = run.new_zeros((end - begin, target.columns))
    rows.view(-1)[skip : skip + high - low] = run[low:high].square()
    if target.weight.transposed:
        sums += rows.sum(0)
    else:
        sums[begin:end] += rows.sum(1)


@dataclass(frozen=True, slots=True)
class Product:
    """A plain weight's delta on some rows of the memory in which a run is merged: ``offset`` and ``shape`` there, and
    the ``rows`` of the B factor (``None``: all)."""

    weight: Weight
    offset: int
    shape: tuple[int, int]
    rows: slice | None


@dataclass(frozen=True, slots=True)
class Steps:
    """The merge of one run: its first element in the base, its elements, the ``margin`` of memory on both sides for
    rows that it cuts, ``products`` of plain weights, and ``others``, left to PEFT."""

    first: int
    count: int
    margin: int
    products: tuple[Product, ...]
    others: tuple[Target, ...]


def steps_of(targets: tuple[Target, ...], first: int, count: int) -> Steps:
    """The steps for elements ``[first, first + count)`` of the base that holds these weights."""
    inside = [target for target in targets if target.overlaps(first, count)]
    plain = [target for target in inside if target.weight.plain]
    margin = -(-max((target.columns for target in plain), default=0) // _ALIGNED) * _ALIGNED
    products = []
    for target in plain:
        low, _, begin, end, skip = target.window(first, count)
        rows = None if (begin, end) == (0, target.shape[0]) else slice(begin, end)
        products.append(Product(target.weight, margin + low - skip, (end - begin, target.columns), rows))
    return Steps(first, count, margin, tuple(products), tuple(target for target in inside if not target.weight.plain))


class Scratch:
    """The fp32 memory for merging on a device, kept from run to run: a run is read before the next overwrites it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._views: dict[tuple[int, ...], torch.Tensor] = {}  # a model has few shapes and many weights of each

    def release(self) -> None:
        self._views, self._memory = {}, None

    def merge(
        self, run: torch.Tensor, steps: Steps, factors: Factors, scales: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns a run, 1-D and on the device, with the deltas of all the weights in it added, in fp32; the next call
        overwrites it. Factors of plain weights are fp32; ``scales`` are DoRA's by name of the weight.

        PEFT rounds ``B @ A``, then its product with ``scaling``, then the sum. Of a plain weight all three are rounded
        once, to fp32, in one launch; a row that the run cuts is multiplied whole, over the margins next to the run.
        """
        merged = self._view(steps.margin, steps.count, steps.margin)
        merged.copy_(run)
        with full_precision():
            for product in steps.products:
                weight, rows = product.weight, product.rows
                b = factors[weight.b] if rows is None else factors[weight.b][rows]
                self._rows(product.offset, product.shape).addmm_(b, factors[weight.a], alpha=weight.scaling)
            for target in steps.others:
                merge_run(merged, steps.first, target, factors, scales.get(target.weight.name))
        return merged

    def _view(self, origin: int, count: int, margin: int) -> torch.Tensor:
        """Elements ``[origin, origin + count)`` of memory that goes on for ``margin`` more."""
        view = self._views.get((origin, count, margin))
        if view is None:
            if self._memory is None or self._memory.numel() < origin + count + margin:
                self.release()  # before more is taken
                with torch.inference_mode(False):  # else it could not be written outside
                    self._memory = torch.empty(origin + count + margin, dtype=torch.float32, device=self._device)
            view = self._views[origin, count, margin] = self._memory.narrow(0, origin, count)
        return view

    def _rows(self, offset: int, shape: tuple[int, int]) -> torch.Tensor:
        """Elements of the memory, from ``offset`` on, as a matrix; inside what a view was taken of before."""
        rows = self._views.get((offset, *shape, 0))
        if rows is None:
            assert self._memory is not None
            rows = self._views[(offset, *shape, 0)] = self._memory.as_strided(shape, (shape[1], 1), offset)
        return rows


def full_precision() -> AbstractContextManager[None]:
    """A context in which products of fp32 matrices are computed in fp32, also where the trainer allows TF32."""
    try:
        held = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set torch's newer switch, and then torch refuses to read this one
        held = ""
    return _NOTHING if held == "highest" else _without_tf32(held)


@contextmanager
def _without_tf32(held: str) -> Iterator[None]:
    """``held``: to go back to; empty where the newer switch is set."""
    newer = "" if held else torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if held:
            torch.set_float32_matmul_precision(held)
        else:
            torch.backends.cuda.matmul.fp32_precision = newer
