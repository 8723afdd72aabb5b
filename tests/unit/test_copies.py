# SPDX-License-Identifier: Apache-2.0
"""Blocks, the hash, and the kernel: compiled on a GPU, in Triton's interpreter without one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fresh_process import passed
from verl_sync_plugin.copies import plain
from verl_sync_plugin.copies.copier import Copier, Memory
from verl_sync_plugin.copies.plain import Block
from verl_sync_plugin.copies.table import ROW_BYTES, alternating


def test_kernel_in_the_interpreter() -> None:
    """Triton decides at its first import whether it interprets, so what needs the kernel runs in a new process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is that process")
    if torch.cuda.is_available():
        pytest.skip("the other tests run the kernel itself here")
    pytest.importorskip("triton")
    files = [f"unit/test_{name}.py" for name in ("copies", "packing", "wire", "model_load")]
    said = passed("-m", "not gpu", "-k", "not by_plain", *files, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert "1 skipped" in said, "everything but this test must have run"


def test_factors_are_no_simple_function_of_the_place() -> None:
    """Patterns in which a factor linear in the place lets changes cancel out: all pairs of swapped rows of an identity
    matrix in bfloat16, and blocks of equal words in another place."""
    size = 512
    row = torch.arange(size)
    word = row[:, None] * (size // 4) + row // 4
    halves = torch.stack(plain.factors(word))
    assert bool((halves[0] != halves[1]).all()), "halves of a word cannot change places"
    one = 0x3F80 << (row % 2 * 16)
    hashed = torch.where(row % 4 < 2, halves[0], halves[1]) * one  # [i, j]: of a one in row i and column j
    ones = hashed.diagonal()
    changed = hashed + hashed.T - ones[:, None] - ones
    assert int((changed == 0).sum()) == size, "only rows swapped with themselves go unnoticed"
    for length in (2, 16):
        both = torch.stack(plain.factors(torch.arange(1 << 20))).sum(0)
        blocks = both.unfold(0, length, 1).sum(1)
        same = blocks.numel() - blocks.unique().numel()
        assert same < 1024, f"{same} blocks of {length} words hash like another: by chance it were a hundred"


BLOCKS = [
    pytest.param(Block(0, 0, 0, 1 << 16), id="wide"),
    pytest.param(Block(64, 32, 64, 96, 50, 160, 96, 160), id="wide-lines"),
    pytest.param(Block(0, 16, 0, 140_000 // 16 * 16, 2, 150_000 // 16 * 16, 140_000 // 16 * 16, 160), id="long-lines"),
    pytest.param(Block(6, 10, 6, 34, 7, 100, 50, 100), id="pairs"),
    pytest.param(Block(1, 3, 1, 35, 7, 101, 51, 101), id="bytes"),
    pytest.param(Block(2, 0, 2, 20_002), id="unaligned"),
    pytest.param(Block(0, 0, 0, 16, 3, 32, 16, 3 << 31), id="far"),
    *(
        pytest.param(Block(4 * first, at, at, 2 * count, grow=2), id=f"cast-{count}")
        for first, count, at in ((0, 40_000, 0), (8, 4096, 32), (4, 1001, 6))
    ),
    *(  # columns of a matrix: every line is cast and goes to a place of its own
        pytest.param(Block(64, 32, 8, width, lines, 4 * pitch, 2 * width + 16, width, grow=2), id=f"cast-{lines}-lines")
        for lines, width, pitch in ((3, 4096, 5000), (5, 24, 40), (7, 34, 51), (2, 140_000, 70_016))
    ),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_kernel_copies_casts_and_hashes_like_plain_torch(block: Block, device: str) -> None:
    place = torch.device(device)
    source = torch.randint(1, 256, (1 << 21,), dtype=torch.uint8).to(device)
    if block.grow == 2:
        wide = torch.randn(1 << 19, device=device)
        # Triton's interpreter cuts where a GPU and torch round
        source = (wide.bfloat16().float() if device == "cpu" else wide).view(torch.uint8)

    def moved(kernel: bool, **how: bool) -> tuple[torch.Tensor, list[int]]:
        target, sums = torch.zeros(1 << 20, dtype=torch.uint8, device=device), torch.zeros(2, dtype=torch.int64)
        copier, sums = Copier(place, [target]), sums.to(device)
        copier.kernel = kernel
        ready = copier.prepare([replace(block, target=target.data_ptr() + block.target)])
        ready.run(Memory(place, [source.data_ptr()], [source]), sums, **how)
        return target, sums.tolist()

    (copied, hashed), (expected, sums) = moved(True), moved(False)
    assert torch.equal(copied, expected) and hashed == sums and expected.any() and sums[0] and not sums[1]
    (copied, hashed) = moved(True, copy=False)
    assert not copied.any() and hashed == sums
    (copied, hashed) = moved(True, hashed=False)
    assert torch.equal(copied, expected) and not any(hashed)


# In which order the rows of a copy are read that lie on several devices


@pytest.mark.parametrize("shares", [(1.0,), (0.25,) * 4, (0.79, 0.07, 0.07, 0.07)])
def test_every_home_is_read_evenly_and_in_its_own_order(shares: tuple[float, ...]) -> None:
    chance = np.random.default_rng(0)
    nbytes = chance.integers(1, ROW_BYTES + 1, 2000)
    homes = np.sort(chance.choice(len(shares), 2000, p=shares))  # one after the other, as experts lie
    order = alternating(homes, nbytes)
    assert sorted(order) == list(range(2000))
    everything, done = np.bincount(homes, nbytes), np.zeros(len(shares))
    for row in order:
        done[homes[row]] += nbytes[row]
        read = done / everything
        assert read.max() - read.min() < 2 * ROW_BYTES / everything.min()
    for home in range(len(shares)):
        assert (np.diff(order[homes[order] == home]) > 0).all()


# The hash in plain torch operations: what it is defined to be, and in little memory


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
