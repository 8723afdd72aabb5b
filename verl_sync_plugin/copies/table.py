# SPDX-License-Identifier: Apache-2.0
"""From blocks to the kernel's tables, and the launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_sync_plugin.copies.plain import Block, Memory
from verl_sync_plugin.layout.tensors import dtype_name
from verl_sync_plugin.log import say

BAND = 4  # blocks that one program quantizes
ROW_BYTES = 128 * 1024  # what one program copies: small enough to fill the machine, large enough for a short table
# Of the elements in an 8-byte word: all bits of the exponents, and the lowest bit of each
EXPONENTS = {
    "bfloat16": (0x7F80_7F80_7F80_7F80, 0x0080_0080_0080_0080),
    "float16": (0x7C00_7C00_7C00_7C00, 0x0400_0400_0400_0400),
    "float32": (0x7F80_0000_7F80_0000, 0x0080_0000_0080_0000),
    "float64": (0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
}


def _lane(block: Block) -> int:
    """The widest lane that a block's addresses and lengths allow; lanes of 8 that do not cast come in pairs."""
    read, written = block.source, block.target | block.position | block.width
    if block.count > 1:
        read |= block.source_stride
        written |= block.target_stride | block.position_stride
    if block.ratio == 2:
        return 8 if read % 16 == 0 and written % 8 == 0 else 2
    if (read | written) % 16 == 0:
        return 8
    return 2 if (read | written) % 2 == 0 else 1


def _numbered(many: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers rows, ``many[i]`` of them for each i: that i, and the number of the row there; ints of shape ``(n,)``."""
    of = np.repeat(np.arange(len(many)), many)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many)


def _rows(blocks: Sequence[Block], tall: bool) -> np.ndarray:
    """Blocks cut into rows, in their order: int64 of shape ``(n, 10)``, in bytes."""
    fields = [
        (b.source, b.target, b.position, b.width, b.count, b.source_stride, b.target_stride, b.position_stride,
         b.region, b.group, b.ratio)
        for b in blocks
    ]  # fmt: skip
    table = np.array(fields, dtype=np.int64)
    step = np.maximum(1, ROW_BYTES // table[:, 3]) if tall else np.ones(len(table), dtype=np.int64)  # runs per row
    columns = np.ones_like(step) if tall else -(-table[:, 3] // ROW_BYTES)  # rows per run
    of, number = _numbered(-(-table[:, 4] // step) * columns)
    run, column = np.divmod(number, columns[of])
    first, offset = run * step[of], column * ROW_BYTES
    source, target, position, width, count, by, target_by, position_by, region, group, ratio = table[of].T
    per_run = width if tall else np.minimum(width - offset, ROW_BYTES)
    runs = np.minimum(count - first, step[of])
    found = (
        source + first * by + offset * ratio, target + first * target_by + offset,
        position + first * position_by + offset, by, target_by, position_by, region, group, runs * per_run, per_run,
    )  # fmt: skip
    return np.stack(found, 1)


def alternating(homes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """An order of rows in which those of every home come evenly, by bytes, each home's in their own order.

    Read one home after the other, all readers would wait for the links of the same device at a time, and would use
    either these or their own memory.

    Args:
        homes: int of shape ``(n,)``: where each row is read.
        nbytes: int of shape ``(n,)``: how much of it, at least 1.
    """
    place = np.empty(len(homes))
    for home in np.unique(homes):
        at = np.flatnonzero(homes == home)
        done = np.cumsum(nbytes[at])
        place[at] = (done - nbytes[at] / 2) / done[-1]
    return np.lexsort((homes, place))


class _Pointers:
    """Addresses from which blocks count, on the device; sent there again only when one is another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known, self._sent = tuple[int, ...](), torch.empty(0)

    def sent(self, target: int, sources: Iterable[int]) -> torch.Tensor:
        """The target's address, then those of the sources, each a multiple of 16: int64 of shape ``(1 + n,)``."""
        if (pointers := (target, *sources)) != self._known:
            self._known, self._sent = pointers, torch.tensor(pointers, dtype=torch.int64).to(self._device)
        return self._sent


class KernelTable:
    """The rows of a bucket, or of all of them, resident on the device and used again every sync.

    Device memory: 64 bytes per row of at most ``ROW_BYTES``.

    Args:
        blocks: what is copied.
        device: where the kernel runs.
        homes: number of the device that each region of the blocks is on, where there are several: see ``alternating``.
    """

    def __init__(self, blocks: Iterable[Block], device: torch.device, homes: Sequence[int] = ()) -> None:
        kinds: dict[tuple[int, bool, bool, str], list[Block]] = {}  # the arguments of a launch
        for block in blocks:
            if block.count and block.width:
                tall = block.count > 1 and block.width <= ROW_BYTES
                kinds.setdefault((_lane(block), tall, block.ratio == 2, block.dtype), []).append(block)
        self._pointers = _Pointers(device)
        self._parts = []
        for (lane, tall, cast, dtype), alike in kinds.items():
            rows = _rows(alike, tall)
            if len(homes):
                rows = rows[alternating(np.array(homes)[rows[:, 6]], rows[:, 8])]
            wide, narrow = rows[:, :6].copy(), rows[:, 6:].astype(np.int32)
            wide[:, 3] //= lane * (2 if cast else 1)
            wide[:, 4:] //= lane
            narrow[:, 2:] //= lane
            parts = [torch.from_numpy(np.ascontiguousarray(part.T)).to(device) for part in (wide, narrow)]
            self._parts.append(((lane, tall, cast, dtype), parts))

    def run(
        self, memory: Memory, sums: torch.Tensor, copy: bool = True, flags: torch.Tensor | None = None, target: int = 0
    ) -> None:
        """Starts the copies from ``memory`` on the current stream, and returns at once.

        Args:
            memory: where sources lie.
            sums: int64 of shape ``(groups,)`` on the device; hashes are added.
            copy: False only reads and hashes.
            flags: int64 of shape ``(groups,)`` on the device; those with a NaN or Inf become other than 0. ``None``
                does not look.
            target: the address from which the targets of blocks count.
        """
        from verl_sync_plugin.copies import kernel

        bases = self._pointers.sent(target, memory.starts)
        for (lane, tall, cast, dtype), (wide, narrow) in self._parts:
            exponent, lowest = EXPONENTS.get(dtype, (0, 0)) if flags is not None else (0, 0)
            block, warps = (kernel.BLOCK, kernel.WARPS) if copy else (kernel.READ_BLOCK, kernel.READ_WARPS)
            if cast and lane == 8:
                block, warps = kernel.CAST_BLOCK, kernel.WARPS
            kernel.move_rows[(wide.shape[1],)](
                wide, narrow, wide.shape[1], bases, sums, sums if flags is None else flags,
                lane, cast, tall, copy, exponent, lowest, block, num_warps=warps,
            )  # fmt: skip


class Rectangle(NamedTuple):
    """Lines of a matrix that are measured, or quantized to fp8.

    Attributes:
        row, column: of the first element in the whole matrix.
        lines, columns: how many.
        region, source: where the first element is read; in elements.
        stride: from one line to the next, in elements read, which is also that in the bucket.
        target, target_stride: where it is written, in bytes.
        scale_region, scale, scales: where the matrix's first scale is, in elements, and how many a line of blocks has.
        position, group: its byte in the bucket and the number of the sum, where it is hashed.
    """

    row: int
    column: int
    lines: int
    columns: int
    region: int
    source: int
    stride: int
    target: int
    target_stride: int
    scale_region: int
    scale: int
    scales: int
    position: int = 0
    group: int = 0


def _bands(rectangles: Iterable[Rectangle], high: int, wide: int) -> np.ndarray:
    """Rows of the kernel's table, each in one line of blocks of ``high`` times ``wide``: int64 of shape ``(n, 12)``."""
    table = np.array(list(rectangles), dtype=np.int64).reshape(-1, len(Rectangle._fields))
    across = -(-(table[:, 1] % wide + table[:, 3]) // (wide * BAND))
    of, number = _numbered(-(-(table[:, 0] % high + table[:, 2]) // high) * across)
    r: Any = Rectangle(*table[of].T)
    down, right = np.divmod(number, across[of])
    top, left = down * high - r.row % high, right * wide * BAND - r.column % wide
    y, x = top.clip(0), left.clip(0)
    read, written, below = y * r.stride + x, y * r.target_stride + x, np.minimum(top + high, r.lines) - y
    return np.stack((
        r.region, r.source + read, r.target + written, r.position + read, r.stride, r.target_stride, below,
        np.minimum(left + wide * BAND, r.columns) - x, (r.column + x) % wide, r.scale_region,
        (r.row + y) // high * r.scales + (r.column + x) // wide + r.scale, r.group,
    ), 1)  # fmt: skip


class QuantizeTable:
    """Parts of matrices that the kernel measures, or quantizes to fp8, block by block.

    Args:
        rectangles: of one dtype each.
        dtypes: of what is read, and to which it is cast first.
        block: rows and columns of a block, powers of two.
        device: where the kernel runs.
        homes: as for ``KernelTable``.
    """

    def __init__(
        self, rectangles: Iterable[Rectangle], dtypes: tuple[torch.dtype, torch.dtype], block: tuple[int, int],
        device: torch.device, homes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        rows = _bands(rectangles, *block)
        if len(homes):
            rows = rows[alternating(np.array(homes)[rows[:, 0]], rows[:, 6] * rows[:, 7])]
        _, source, target, position, stride, target_stride, _, columns, before, *_ = rows.T
        places = source * dtypes[0].itemsize | target | position | stride | target_stride | columns
        wide = (places % 16 == 0) & (before == 0) & (block[1] % 8 == 0)
        parts = ((aligned, rows[wide == aligned]) for aligned in (True, False))
        self._parts = [(aligned, torch.from_numpy(part.T.copy()).to(device)) for aligned, part in parts if len(part)]
        self._dtypes, self._block, self._pointers = dtypes, block, _Pointers(device)

    def run(self, target: int, sources: Sequence[int], sums: torch.Tensor | None = None, measure: bool = False) -> None:
        """Starts on the current stream; writes, unless one of the others is asked for.

        Args:
            target, sources: the addresses from which targets count, and sources in each region; the scales are in some.
            sums: as for ``KernelTable``: adds the hashes of what would be written, and writes nothing.
            measure: the scales become the largest magnitudes, and nothing is quantized.
        """
        from verl_sync_plugin.copies import kernel

        bases = self._pointers.sent(target, sources)
        lie_well = not any(pointer % 16 for pointer in (target, *sources))
        dtypes = [getattr(kernel.tl, dtype_name(dtype)) for dtype in self._dtypes]
        do = "measure" if measure else "write" if sums is None else "hash"
        for aligned, table in self._parts:
            kernel.quantize_rows[(table.shape[1],)](
                table, table.shape[1], bases, bases if sums is None else sums, *dtypes, *self._block,
                aligned and lie_well, do, num_warps=8,
            )  # fmt: skip


def scales_of(largest: torch.Tensor, least: float, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``kernel.divide``: scales of blocks, fp32 of shape ``(n,)``, and their inverses."""
    from verl_sync_plugin.copies import kernel

    scales, inverse = torch.empty_like(largest), torch.empty_like(largest)
    count, block = largest.numel(), kernel.READ_BLOCK
    kernel.divide[(-(-count // block),)](largest, scales, inverse, count, least, most, block)
    return scales, inverse


def kernel_works(device: torch.device) -> bool:
    """True if the kernel compiles and copies here; tried on a few bytes.

    Only the variant that most rows need is tried. The others are compiled when a table has rows of them: to try all
    eighteen took 3.9 s on an H200 where Triton's cache was empty (1.1 s for the first, then 0.07 to 0.27 s each), and a
    run needs about three of them.
    """
    if device.type != "cuda":
        return False
    try:
        source = torch.arange(256, dtype=torch.uint8, device=device)
        target, sums = torch.zeros_like(source), torch.zeros(1, dtype=torch.int64, device=device)
        memory = Memory(device, [source.data_ptr()], [source])
        KernelTable([Block(0, 0, 0, 16)], device).run(memory, sums, target=target.data_ptr())
        return bool(torch.equal(source[:16], target[:16]) and sums.item() != 0)
    except Exception as error:  # no Triton, no C compiler, an unknown device: all end in plain copies
        say(f"the Triton kernel does not work here, so copies run one by one: {error!r}")
        return False
