# SPDX-License-Identifier: Apache-2.0
"""A copy plan that reads the trainer's parameters where they lie: all buckets in one go, without slots.

The works of a replay say which bytes of which bucket go where. A bucket is then only a way to number bytes, which the
hash depends on: every block is moved to where the trainer rank holds these bytes, and cast on the way where it holds
them in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.bucket_memory import RegionMemory
from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.layout.strided import Partition, Run
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


class DirectLoads:
    """The direct load of one manifest, made anew for another replay or other places.

    Args:
        manifest: what the buckets hold.
        device: where the model is.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        self._made: tuple[Sequence[Work], tuple[str, ...], DirectLoad] | None = None

    def of(
        self, works: Sequence[Work], lives: Sequence[Live], place: int, regions: Regions, copier: Copier
    ) -> DirectLoad:
        """Arguments and errors as of ``DirectLoad``, but for what this knows."""
        keys = tuple(live.key for live in lives)
        if self._made is None or self._made[0] is not works or self._made[1] != keys:
            load = DirectLoad(works, self._manifest, lives, place, regions, copier, self._device)
            self._made = works, keys, load
        return self._made[2]

    def forget(self) -> None:
        """Regions are about to be unmapped; mapped again, they may lie elsewhere."""
        self._made = None


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
        self._partition = Partition([Run(first, first, nbytes) for first, nbytes, *_ in self._rows])

    def moved(self, block: Block) -> Iterator[Block]:
        """The same bytes, read from the regions."""
        strides = block.source_stride, block.target_stride
        read = Run(block.source, block.target, block.width * block.grow, block.count, *strides)
        left = read.width * read.count
        for number, run in self._partition.meet(read, (1, block.grow)):
            left -= run.width * run.count
            first, _, region, source, grow = self._rows[number]
            if grow == 2 and block.grow == 2:
                raise ValueError(f"byte {run.source} of bucket {self._bucket} would be cast twice")
            yield Block(
                source + (run.source - first) * grow, run.target, run.source, run.width // block.grow, run.count,
                run.source_stride * grow, run.target_stride, run.source_stride,
                base=region, group=block.group, grow=block.grow * grow, dtype=block.dtype,
            )  # fmt: skip
        if left:
            last = read.source + (read.count - 1) * read.source_stride + read.width - 1
            raise ValueError(
                f"no trainer rank told where {left} of bytes {read.source} to {last} of bucket {self._bucket} lie"
            )


def _as_block(cast: Cast) -> Block:
    """A cast from fp32 to bf16 as the kernel does it; its width is then of what is written."""
    return replace(cast.block, width=cast.block.width // 2, grow=2)
