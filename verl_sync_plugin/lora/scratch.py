"""The fp32 memory in which one run after another is merged, and the precision in which that is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from verl_sync_plugin.lora.delta import Factors
from verl_sync_plugin.lora.merge import Target, add_plain, merge_run

_ALIGNED = 16  # elements; cuBLAS and the copy kernels are slower on addresses that are not multiples of 16 bytes


class Scratch:
    """Kept from run to run. One stream may use it, which then reads a run before the next one overwrites it.

    Args:
        device: where the runs are merged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None

    def release(self) -> None:
        """Gives the memory back."""
        self._memory = None

    def merge(
        self,
        run: torch.Tensor,
        first: int,
        targets: tuple[Target, ...],
        factors: Factors,
        scales: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """A run with the deltas of all the weights in it.

        Args:
            run: 1-D, on the device; elements ``[first, first + len(run))`` of the base. Not written.
            first: see ``run``.
            targets: the adapted weights of the base.
            factors: see ``delta_rows``; those of plain weights in fp32.
            scales: DoRA's, by name of the weight; see ``merge_run``.

        Returns:
            fp32, 1-D; overwritten by the next call.
        """
        count = run.numel()
        inside = [target for target in targets if target.overlaps(first, count)]
        margin = max((target.columns for target in inside if target.weight.plain), default=0)
        margin = -(-margin // _ALIGNED) * _ALIGNED
        memory = self._at_least(margin + count + margin)
        merged = memory.narrow(0, margin, count)
        merged.copy_(run)
        with full_precision():
            for target in inside:
                if target.weight.plain:
                    add_plain(memory, margin, first, count, target, factors)
                else:
                    merge_run(merged, first, target, factors, scales.get(target.weight.name))
        return merged

    def _at_least(self, count: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < count:
            self._memory = None  # before more is taken
            self._memory = torch.empty(count, dtype=torch.float32, device=self._device)
        return self._memory


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, products of fp32 matrices are fp32 products, also for a trainer that allows TF32, with its 10 bits."""
    held = ""
    try:
        held = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set torch's newer switch, and then torch refuses to read this one
        newer = torch.backends.cuda.matmul.fp32_precision
    if held == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if held:
            torch.set_float32_matmul_precision(held)
        else:
            torch.backends.cuda.matmul.fp32_precision = newer
