# SPDX-License-Identifier: Apache-2.0
"""Blocks of bytes, and their hash in plain torch operations: used without Triton, and the reference for the kernel.

The hash of some bytes is the sum, modulo 2^64, over all 8-byte words of lower half times ``f`` plus upper half times
``g``, both odd pseudo-random factors below 2^32 of the word's place in all buckets. A word may be cut: its parts add up
to it. So the sum does not depend on how the bytes were cut into copies or in which order they ran. One changed bit
changes it by an odd multiple of at most 2^31, which does not vanish either when up to 2^32 readers of the same bytes
are added up (multiplied as whole words, the upper bits would). Several changed words go unnoticed where their
differences, each times its factor, add up to zero. That is one chance in 2^31 or less where these are unrelated to
each other; and the factors are no simple function of the place, so it is rare in patterns as well (swapped rows of
an identity, constant blocks in the wrong place; the tests sample them). It is no defence against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_sync_plugin.layout.strided import Run

STEP = 1 << 18  # bytes hashed at a time, a multiple of 8; bounds the memory that the hash takes
# 2^32 by the golden ratio, as in Knuth's multiplicative hashing (The Art of Computer Programming, volume 3, 6.4)
GOLDEN = 0x9E3779B1
FIRST = 0x85EBCA6B  # of word 0, whose factors would both be 1; any odd number of 32 bits
HALF = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` runs of ``width`` bytes, each ``*_stride`` bytes after the one before.

    Attributes:
        source: byte where the first run is read, relative to the start of region number ``region``.
        target: byte where it is written, relative to one target address for all blocks.
        position: byte offset in all buckets of what is read or written; what the hash depends on.
        group: number of the sum that the block's hash goes into.
        grow: bytes read per byte written: 2 casts fp32 to bf16; ``width`` then counts what is written.
        dtype: of the elements written, where NaN and Inf are to be looked for; else empty.
    """

    source: int
    target: int
    position: int
    width: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0
    position_stride: int = 0
    region: int = 0
    group: int = 0
    ratio: int = 1
    dtype: str = ""


class Memory:
    """Regions of memory that blocks are read from.

    Args:
        device: the reading one.
        starts: for each region, the address from which the sources of its blocks count.
        flats: the bytes of each (uint8 of shape ``(n,)``); the kernel needs none.
    """

    def __init__(self, device: torch.device, starts: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        self.device, self.starts, self.flats = device, tuple(starts), tuple(flats)

    def at(self, region: int, source: int) -> tuple[torch.Tensor, int]:
        """The bytes of a region, and the place in them of byte ``source``."""
        flat = self.flats[region]
        return flat, self.starts[region] + source - flat.data_ptr()


def factors(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd pseudo-random numbers below 2^32 for the lower and the upper half of each word; int64 of the same shape.

    A number is squared, as in Widynski's middle-square Weyl generator (https://arxiv.org/abs/1704.00358), because a GPU
    has multiplications to spare while it hashes, but no shifts. Multiplied only, factors would be linear in the place,
    and what is moved by the same distance in opposite directions would cancel out.
    """
    mixed = ((words & HALF) * GOLDEN + FIRST) & HALF
    square = mixed * mixed
    low, high = square & HALF, (square >> 32) & HALF
    return (low ^ high) | 1, (((low - high) & HALF) ^ mixed) | 1


def hash_block(flat: torch.Tensor, start: int, block: Block) -> torch.Tensor:
    """The hash of a block's bytes wherever they lie; int64 of shape ``()``. Where everything is a multiple of 8 it
    goes word by word, else byte by byte, ten times as slowly.

    Memory: some ten times ``STEP``, whatever the size of the block.

    Args:
        flat: uint8 of shape ``(n,)``.
        start: first byte of the block in ``flat``; runs follow each other by ``block.source_stride``.
        block: its width, count and position count.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    strides = block.source_stride, block.position_stride
    offsets = flat.storage_offset() + start, flat.data_ptr() + start
    words = not any(number % 8 for number in (block.position, block.width, *strides, *offsets))
    most = STEP if words else STEP // 8
    rows = max(1, most // max(block.width, 1))
    for first in range(0, block.count, rows):
        count = min(rows, block.count - first)
        run = torch.arange(first, first + count, device=flat.device)[:, None] * block.position_stride
        for begin in range(0, block.width, most):
            end = min(begin + most, block.width)
            tile = runs(flat, start + first * block.source_stride + begin, end - begin, count, block.source_stride)
            at = run + torch.arange(begin, end, 8 if words else 1, device=flat.device) + block.position
            lower, upper = factors(at // 8)
            if words:
                bits = tile.view(torch.int64)
                total += ((bits & HALF) * lower + ((bits >> 32) & HALF) * upper).sum()
            else:
                total += ((tile.long() << 8 * (at & 3)) * torch.where(at & 4 == 0, lower, upper)).sum()
    return total


def runs(flat: torch.Tensor, start: int, width: int, count: int, stride: int) -> torch.Tensor:
    """Runs of bytes inside flat memory: uint8 of shape ``(count, width)``, a view."""
    return flat.as_strided((count, width), (stride if count > 1 else width, 1), flat.storage_offset() + start)


def copy_runs(flat: torch.Tensor, start: int, target: torch.Tensor, target_start: int, like: Run | Block) -> None:
    """Copies runs of bytes, from ``start`` and to ``target_start`` in flat memory, as wide and as far apart as those of
    ``like``."""
    # A strided copy of single bytes is slow: use the widest element that divides everything
    numbers = (like.width, start, target_start) + (like.source_stride, like.target_stride) * (like.count > 1)
    offsets = flat.data_ptr(), flat.storage_offset(), target.data_ptr(), target.storage_offset()
    element = getattr(torch, f"int{8 * math.gcd(8, *offsets, *numbers)}")
    source = runs(flat, start, like.width, like.count, like.source_stride).view(element)
    runs(target, target_start, like.width, like.count, like.target_stride).view(element).copy_(source)


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage: uint8 of shape ``(n,)``, a view."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
