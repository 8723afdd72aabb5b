"""A copy plan that reads the trainer's parameters where they lie: all buckets in one go, without slots.

The works of a replay say which bytes of which bucket go where. A bucket is then only a way to number bytes, which the
hash depends on: every block is moved to where the trainer rank holds these bytes, and cast on the way where it holds
them in fp32.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.bucket_memory import RegionMemory
from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.receiver.cuts import Cast, Work
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.memory.regions import Regions
from verl_sync_plugin.transport.protocol import Manifest


def obstacle(works: Sequence[Work], device: torch.device, kernel: bool) -> str:
    """Why these cannot be read where they lie; empty when they can.

    Args:
        works: of a replay.
        device: where the model is.
        kernel: there is the kernel; plain copies need tensors, and a mapped allocation of a GPU is none.
    """
    if device.type == "cuda" and not kernel:
        return "there is no Triton kernel in the engine"
    for work in works:
        if work.leftovers:
            return f"the model loads {work.leftovers[0].name} itself"
        for name, cast in work.casts:
            if (cast.planned.dtype, cast.planned.target_dtype) != (torch.float32, torch.bfloat16):
                return f"{name} travels as {cast.planned.dtype} and is kept as {cast.planned.target_dtype}"
    return ""


class DirectLoad:
    """The blocks of all buckets. Device memory: the tables (see ``KernelTable``).

    Args:
        works: of a replay, without ``obstacle``.
        manifest: what the buckets hold.
        lives: where the parameters of all ranks of the group lie.
        place: which of them is on this device.
        regions: has mapped them.
        copier: makes the copies.
        device: where the model is.

    Raises:
        ValueError: the trainer did not tell where some bytes lie, or holds fp32 that is to be cast twice.
    """

    def __init__(
        self,
        works: Sequence[Work],
        manifest: Manifest,
        lives: Sequence[Live],
        place: int,
        regions: Regions,
        copier: Copier,
        device: torch.device,
    ) -> None:
        all_regions = [region for live in lives for region in live.regions]
        flats = [] if device.type == "cuda" else [regions.flat(region) for region in all_regions]
        self._memory = RegionMemory(device, [regions.address(region) for region in all_regions], flats)
        parts: tuple[list[Block], list[Block], list[Block]] = ([], [], [])
        for index, work in enumerate(works):
            where = _Where(index, manifest, lives, place)
            bare = [*work.bare, *(_as_block(cast) for _, cast in work.casts)]
            for blocks, moved in zip((work.fused, bare, work.reads), parts, strict=True):
                moved.extend(piece for block in blocks for piece in where.moved(block))
        homes = [(rank - place) % len(lives) for rank, live in enumerate(lives) for _ in live.regions]
        self._fused, self._bare, self._reads = (copier.prepare(blocks, homes) for blocks in parts)

    def run(self, sums: torch.Tensor, hashed: bool) -> None:
        """Starts all copies on the current stream."""
        self._fused.run(self._memory, sums, hashed=hashed)
        self._bare.run(self._memory, sums, hashed=False)
        if hashed:
            self._reads.run(self._memory, sums, copy=False)


class _Where:
    """Where the bytes of one bucket lie."""

    def __init__(self, bucket: int, manifest: Manifest, lives: Sequence[Live], place: int) -> None:
        world, segment = manifest.worlds[bucket], manifest.segments[bucket]
        self._bucket = bucket
        rows: list[tuple[int, int, int, int, int]] = []
        first_region = 0
        for number, live in enumerate(lives):
            if world > 1 or number == place:
                held = np.frombuffer(live.runs[bucket], dtype="<i8").reshape(-1, 5)
                # The only segment of what every rank holds is the own rank's; its numbers count from 0 like the others'
                low = number * segment if world > 1 else 0
                if len(held) and not low <= held[0, 0] <= held[-1, 0] < low + segment:
                    raise ValueError(f"trainer rank {number} tells of bytes of bucket {bucket} that are not its own")
                rows.extend((o, n, first_region + r, source, grow) for o, n, r, source, grow in held.tolist())
            first_region += len(live.regions)
        self._rows = sorted(rows)
        self._firsts = [row[0] for row in self._rows]

    def moved(self, block: Block) -> Iterator[Block]:
        """The same bytes, read from the regions."""
        if block.lines == 1:
            yield from self._cut(block)
            return
        first, nbytes, region, source, grow = self._row(block.source)
        last = block.source + (block.lines - 1) * block.source_stride + _span(block)
        if last <= first + nbytes:
            yield self._at(block, (first, nbytes, region, source, grow))
            return
        for line in range(block.lines):  # a matrix cut between its rows
            single = replace(
                block,
                source=block.source + line * block.source_stride,
                target=block.target + line * block.target_stride,
                position=block.position + line * block.position_stride,
                lines=1,
            )
            yield from self._cut(single)

    def _cut(self, block: Block) -> Iterator[Block]:
        done = 0
        while done < block.width:
            read = done * block.grow
            row = self._row(block.source + read)
            width = min(block.width - done, (row[0] + row[1] - block.source - read) // block.grow)
            yield self._at(
                replace(
                    block,
                    source=block.source + read,
                    target=block.target + done,
                    position=block.position + done,
                    width=width,
                ),
                row,
            )
            done += width

    def _row(self, offset: int) -> tuple[int, int, int, int, int]:
        index = bisect_right(self._firsts, offset) - 1
        row = self._rows[index] if index >= 0 else (0, 0, 0, 0, 0)
        if offset >= row[0] + row[1]:
            raise ValueError(f"no trainer rank told where byte {offset} of bucket {self._bucket} lies")
        return row

    def _at(self, block: Block, row: tuple[int, int, int, int, int]) -> Block:
        first, _, region, source, grow = row
        if grow == 2 and block.grow == 2:
            raise ValueError(f"byte {block.source} of bucket {self._bucket} would be cast twice")
        return replace(
            block,
            source=source + (block.source - first) * grow,
            source_stride=block.source_stride * grow,
            base=region,
            grow=block.grow * grow,
        )


def _span(block: Block) -> int:
    """Bytes read of each line."""
    return block.width * block.grow


def _as_block(cast: Cast) -> Block:
    """A cast from fp32 to bf16 as the kernel does it; its width is then of what is written."""
    return replace(cast.block, width=cast.block.width // 2, grow=2)
