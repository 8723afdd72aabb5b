"""From blocks to the kernel's tables, and the launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from verl_sync_plugin.copies.blocks import Block

ROW_BYTES = 128 * 1024  # what one program copies: small enough to fill the machine, large enough for a short table
LANES = (8, 2, 1)


def _lane(block: Block) -> int:
    """The widest lane that every address and length of a block allows; lanes of 8 come in aligned pairs."""
    marks = block.source | block.target | block.position | block.width
    if block.grow == 2:
        return 8 if marks % 16 == 0 else 2
    if block.lines > 1:
        marks |= block.source_stride | block.target_stride | block.position_stride
    if marks % 16 == 0:
        return 8
    return 2 if marks % 2 == 0 else 1


def _rows(block: Block) -> np.ndarray:
    """A block cut into rows: int64 of shape ``(n, 10)``, in bytes."""
    tall = block.lines > 1 and block.width <= ROW_BYTES
    if tall:
        step = max(1, ROW_BYTES // block.width)
        line = np.arange(0, block.lines, step, dtype=np.int64)
        column = np.zeros(1, dtype=np.int64)
    else:
        step = 1
        line = np.arange(block.lines, dtype=np.int64)
        column = np.arange(0, block.width, ROW_BYTES, dtype=np.int64)
    first, offset = (grid.reshape(-1) for grid in np.meshgrid(line, column, indexing="ij"))
    rows = np.empty((first.size, 10), dtype=np.int64)
    rows[:, 0] = block.source + first * block.source_stride + offset * block.grow
    rows[:, 1] = block.target + first * block.target_stride + offset
    rows[:, 2] = block.position + first * block.position_stride + offset
    rows[:, 3], rows[:, 4], rows[:, 9] = block.source_stride, block.target_stride, block.position_stride
    rows[:, 5], rows[:, 6] = block.base, block.group
    rows[:, 8] = block.width if tall else np.minimum(block.width - offset, ROW_BYTES)
    rows[:, 7] = rows[:, 8] * (np.minimum(block.lines - first, step) if tall else 1)
    return rows


class KernelTable:
    """The rows of one bucket, resident on the device and used again every sync.

    Device memory: 60 bytes per ``ROW_BYTES`` copied.
    """

    def __init__(self, blocks: Iterable[Block], device: torch.device) -> None:
        kinds: dict[tuple[int, bool, bool], list[np.ndarray]] = {}
        for block in blocks:
            if block.lines and block.width:
                tall, cast = block.lines > 1 and block.width <= ROW_BYTES, block.grow == 2
                kinds.setdefault((_lane(block), tall, cast), []).append(_rows(block))
        self._device = device
        self._parts = [(kind, *self._upload(np.concatenate(rows), kind)) for kind, rows in kinds.items()]

    def _upload(self, rows: np.ndarray, kind: tuple[int, bool, bool]) -> tuple[torch.Tensor, torch.Tensor, int]:
        lane = 2 if kind[2] else kind[0]
        wide, narrow = rows[:, :5].copy(), rows[:, 5:].astype(np.int32)
        wide[:, 3:] //= lane
        narrow[:, 2:] //= lane
        assert (rows[:, 5:] < 2**31).all(), "a row's lengths and strides fit 32 bits"
        tensors = [torch.from_numpy(np.ascontiguousarray(part.T)).to(self._device) for part in (wide, narrow)]
        return tensors[0], tensors[1], len(rows)

    def run(self, bases: torch.Tensor, sums: torch.Tensor, copy: bool = True, hashed: bool = True) -> None:
        """Starts the copies on the current stream; returns at once.

        Args:
            bases: the result of ``addresses`` on the device.
            sums: int64 of shape ``(groups,)`` on the device; hashes are added.
            copy: False only reads and hashes.
            hashed: False leaves ``sums`` alone.
        """
        from verl_sync_plugin.copies import kernel

        for (lane, tall, cast), wide, narrow, count in self._parts:
            if cast:
                kernel.cast_rows[(count,)](
                    wide, narrow, count, bases, sums, lane == 8, hashed, kernel.BLOCK, num_warps=kernel.WARPS
                )
            else:
                kernel.copy_rows[(count,)](
                    wide, narrow, count, bases, sums, lane, tall, copy, hashed, kernel.BLOCK, num_warps=kernel.WARPS
                )


def addresses(target: int, sources: Sequence[int], device: torch.device) -> torch.Tensor:
    """What blocks are relative to, as the kernel reads it: int64 of shape ``(1 + n,)``. All divisible by 16."""
    return torch.tensor([target, *sources], dtype=torch.int64).to(device)


def kernel_works(device: torch.device) -> bool:
    """Whether the kernel compiles and copies here; tried on a few bytes, which also warms its variants up."""
    if device.type != "cuda":
        return False
    try:
        return _try_out(device)
    except Exception as error:  # no Triton, no C compiler, an unknown device: all end in plain copies
        print(f"verl-sync-plugin: no Triton kernel here, copies one by one: {error!r}", flush=True)
        return False


def _try_out(device: torch.device) -> bool:
    source = torch.arange(256, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    bases = addresses(target.data_ptr(), [source.data_ptr()], device)
    for width in (16, 2, 1):
        blocks = [Block(0, 0, 0, width), Block(32, 32, 32, width, 2, 2 * width, 2 * width, 2 * width)]
        table = KernelTable(blocks, device)
        for copy, hashed in ((True, True), (True, False), (False, True)):
            table.run(bases, sums, copy, hashed)
    return bool(torch.equal(source[:16], target[:16]) and sums.item() != 0)
