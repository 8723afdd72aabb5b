# SPDX-License-Identifier: Apache-2.0
"""The fp32 memory in which one run after another is merged, and the precision in which that is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from verl_sync_plugin.lora.delta import Factors
from verl_sync_plugin.lora.merge import Steps, merge_run

_NOTHING = nullcontext()


class Scratch:
    """The fp32 memory of one stream for merging, kept from run to run: a run is read before the next one overwrites it.

    Args:
        device: where the runs are merged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._views: dict[tuple[int, ...], torch.Tensor] = {}  # a model has few shapes and many weights of each

    def release(self) -> None:
        """Gives the memory back."""
        self._views = {}
        self._memory = None

    def merge(
        self, run: torch.Tensor, steps: Steps, factors: Factors, scales: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns a run with the deltas of all the weights in it added.

        PEFT rounds ``B @ A``, then its product with ``scaling``, then the sum. Of a plain weight all three are rounded
        once, to fp32, in one launch; a row that the run cuts is multiplied whole, over the margins beside the run.

        Args:
            run: 1-D, on the device; ``steps.count`` elements of the base, from ``steps.first`` on. Not written.
            steps: for this run.
            factors: see ``delta_rows``; those of plain weights in fp32.
            scales: DoRA's, by name of the weight; see ``merge_run``.

        Returns:
            fp32, 1-D; overwritten by the next call.
        """
        merged = self._view(steps.margin, steps.count, steps.margin)
        merged.copy_(run)
        with full_precision():
            for product in steps.products:
                weight, rows = product.weight, product.rows
                b = factors[weight.b] if rows is None else factors[weight.b][rows]
                place = self._rows(product.offset, product.shape)
                place.addmm_(b, factors[weight.a], alpha=weight.scaling)
            for target in steps.others:
                merge_run(merged, steps.first, target, factors, scales.get(target.weight.name))
        return merged

    def _view(self, origin: int, count: int, margin: int) -> torch.Tensor:
        """Elements ``[origin, origin + count)`` of memory that goes on for ``margin`` more."""
        view = self._views.get((origin, count, margin))
        if view is None:
            self._reserve(origin + count + margin)
            assert self._memory is not None
            view = self._views[origin, count, margin] = self._memory.narrow(0, origin, count)
        return view

    def _rows(self, offset: int, shape: tuple[int, int]) -> torch.Tensor:
        """Elements of the memory, from ``offset`` on, as a matrix; inside what a view was taken of before."""
        rows = self._views.get((offset, *shape, 0))
        if rows is None:
            assert self._memory is not None
            rows = self._views[(offset, *shape, 0)] = self._memory.as_strided(shape, (shape[1], 1), offset)
        return rows

    def _reserve(self, count: int) -> None:
        if self._memory is None or self._memory.numel() < count:
            self.release()  # before more is taken
            with torch.inference_mode(False):  # else it could not be written outside
                self._memory = torch.empty(count, dtype=torch.float32, device=self._device)


def full_precision() -> AbstractContextManager[None]:
    """Returns a context in which products of fp32 matrices are computed in fp32, also where the trainer allows TF32 (10
    bits)."""
    try:
        held = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set torch's newer switch, and then torch refuses to read this one
        held = ""
    return _NOTHING if held == "highest" else _without_tf32(held)


@contextmanager
def _without_tf32(held: str) -> Iterator[None]:
    """Args: ``held``: what to go back to; empty where the newer switch is set."""
    newer = "" if held else torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if held:
            torch.set_float32_matmul_precision(held)
        else:
            torch.backends.cuda.matmul.fp32_precision = newer
