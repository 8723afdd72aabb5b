"""Copies and the hash in plain torch operations: where there is no Triton, and the reference for the kernel.

The hash of some bytes is the sum, modulo 2^64, over all 8-byte words of lower half times ``f`` plus upper half times
``g``, both odd pseudo-random factors below 2^32 of the word's place in the bucket. A word may be cut: its parts add up
to it. So the sum does not depend on how the bytes were cut into copies or in which order they ran. One changed bit
changes it by an odd multiple of at most 2^31, which does not vanish either when up to 2^32 readers of the same bytes
are added up (multiplied as whole words, the upper bits would). Several changed words go unnoticed where their
differences, each times its factor, add up to zero. That is one chance in 2^31 or less where these are unrelated to
each other; and the factors are no simple function of the place, so it is rare in patterns as well (swapped rows of
an identity, constant blocks in the wrong place; the tests sample them). It is no defence against an adversary.
"""

from __future__ import annotations

import torch

from verl_sync_plugin.copies.blocks import Block

STEP = 1 << 21  # bytes hashed at a time; bounds the memory that the hash takes
# 2^32 by the golden ratio, as in Knuth's multiplicative hashing (The Art of Computer Programming, volume 3, 6.4)
GOLDEN = 0x9E3779B1
HALF = 0xFFFFFFFF


def factors(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd pseudo-random numbers below 2^32 for the lower and the upper half of each word; int64 of the same shape.

    A number is squared, as in Widynski's middle-square Weyl generator (https://arxiv.org/abs/1704.00358), because a GPU
    has multiplications to spare while it hashes, but no shifts. Multiplied only, factors would be linear in the place,
    and what is moved by the same distance in opposite directions would cancel out.
    """
    mixed = (words & HALF) * GOLDEN & HALF
    square = mixed * mixed
    low, high = square & HALF, (square >> 32) & HALF
    return (low ^ high) | 1, (((low - high) & HALF) ^ mixed) | 1


def _weighed(bits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Words, or parts of words in their places, times the factors of their halves."""
    lower, upper = factors(words)
    return ((bits & HALF) * lower + ((bits >> 32) & HALF) * upper).sum()


def hash_bytes(data: torch.Tensor, position: int) -> torch.Tensor:
    """The hash of consecutive bytes.

    Args:
        data: uint8 of shape ``(n,)``, contiguous.
        position: byte offset of the first one in the bucket.

    Returns:
        int64 of shape ``()`` on the device of ``data``.
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), STEP):
        part, place = data[begin : begin + STEP], position + begin
        if place % 8 or part.numel() % 8 or part.storage_offset() % 8 or part.data_ptr() % 8:
            bytes_at = torch.arange(place, place + part.numel(), device=data.device)
            total += _weighed(part.long() << (bytes_at % 8 * 8), bytes_at // 8)
        else:
            words = torch.arange(place // 8, (place + part.numel()) // 8, device=data.device)
            total += _weighed(part.view(torch.int64), words)
    return total


def hash_block(flat: torch.Tensor, start: int, block: Block) -> torch.Tensor:
    """The hash of a block's bytes wherever they lie; int64 of shape ``()``.

    Args:
        flat: uint8 of shape ``(n,)``.
        start: first byte of the block in ``flat``; runs follow each other by ``block.source_stride``.
        block: its width, lines and position count.
    """
    if block.lines == 1:
        return hash_bytes(flat[start : start + block.width], block.position)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    step = max(1, STEP // block.width)
    column = torch.arange(block.width, device=flat.device)
    for first in range(0, block.lines, step):
        lines = min(step, block.lines - first)
        data = runs(flat, start + first * block.source_stride, block.width, lines, block.source_stride)
        line = torch.arange(first, first + lines, device=flat.device)[:, None]
        place = block.position + line * block.position_stride + column
        total += _weighed(data.long() << (place % 8 * 8), place // 8)
    return total


def runs(flat: torch.Tensor, start: int, width: int, lines: int, stride: int) -> torch.Tensor:
    """Runs of bytes inside flat memory: uint8 of shape ``(lines, width)``, a view."""
    return flat.as_strided((lines, width), (stride if lines > 1 else width, 1), flat.storage_offset() + start)


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind a tensor: uint8 of shape ``(n,)``, a view."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
