# SPDX-License-Identifier: Apache-2.0
"""The hash in plain torch operations: what it is defined to be, and in little memory."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from verl_sync_plugin.copies import plain
from verl_sync_plugin.copies.plain import Block


def hash_of_words(data: bytes, places: list[int]) -> int:
    """The hash as it is defined, byte by byte."""
    words: dict[int, int] = {}
    for byte, place in zip(data, places, strict=True):
        words[place // 8] = words.get(place // 8, 0) + (byte << (8 * (place % 8)))
    lower, upper = (half.tolist() for half in plain.factors(torch.tensor(list(words))))
    parts = zip(words.values(), lower, upper, strict=True)
    total = sum((word & plain.HALF) * low + (word >> 32) * high for word, low, high in parts)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("step", [8, 64, 1 << 18])
def test_hash_is_what_it_is_defined_to_be(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "STEP", step)
    chance = random.Random(step)
    flat = torch.randint(0, 256, (8192,), dtype=torch.uint8)
    for _ in range(150):
        width, lines = chance.choice((1, 7, 8, 24, 33, 200)), chance.choice((1, 1, 2, 9, 20))
        strides = [width + chance.choice((0, 0, 1, 3, 4, 8)) for _ in range(2)]
        start, position = chance.randrange(64), chance.choice((0, 8, 16, chance.randrange(1 << 20)))
        block = Block(0, 0, position, width, lines, strides[0], 0, strides[1])
        held = bytes(flat.tolist())
        data = b"".join(held[start + line * strides[0] :][:width] for line in range(lines))
        places = [position + line * strides[1] + byte for line in range(lines) for byte in range(width)]
        assert plain.hash_block(flat, start, block).item() == hash_of_words(data, places), block


def test_halves_of_any_word_cannot_change_places() -> None:
    lower, upper = plain.factors(torch.arange(1 << 20))
    assert not bool((lower == upper).any())


MEMORY = """
import resource, torch
from verl_sync_plugin.copies import plain
from verl_sync_plugin.copies.plain import Block
torch.set_num_threads(1)
data = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8)
blocks = [Block(0, 0, 0, 24 << 20), Block(0, 0, 3, 24 << 20), Block(0, 0, 5, 4099, 6000, 5000, 0, 4099),
          Block(0, 0, 0, 32, 1 << 18, 64, 0, 32), Block(0, 0, 0, 1, 1 << 18, 64, 0, 64)]
plain.hash_block(data, 1, Block(0, 0, 1, 5000, 2, 5000, 0, 5001))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for block in blocks:
    plain.hash_block(data, 0, block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_hash_takes_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 10, f"{int(done.stdout) >> 10} MiB beside 32 MiB of data"
