# SPDX-License-Identifier: Apache-2.0
"""Covers blocks, the hash, the kernel (compiled, or in Triton's interpreter), packing, and how a NaN is named."""

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fresh_process import passed
from verl_sync_plugin.copies import packing, plain
from verl_sync_plugin.copies.copier import Copier, Memory
from verl_sync_plugin.copies.packing import Packer, pack_slices
from verl_sync_plugin.copies.plain import Block
from verl_sync_plugin.copies.table import ROW_BYTES, alternating
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View, extents_of, numbers_of


def test_kernel_in_the_interpreter() -> None:
    """Triton decides at its first import whether it interprets, so what needs the kernel runs in a new process."""
    if torch.cuda.is_available():
        pytest.skip("the other tests run the kernel itself here")
    pytest.importorskip("triton")
    files = [f"unit/test_{name}.py" for name in ("copies", "quantizing", "model_load")]
    said = passed("-m", "not gpu", *files, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert "1 skipped" in said, "whatever needs the kernel must have run"


def test_factors_are_no_simple_function_of_the_place() -> None:
    """Swaps rows of an identity matrix, and moves blocks of equal words, for which linear factors cancel out."""
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
        pytest.param(Block(4 * first, at, at, 2 * count, ratio=2), id=f"cast-{count}")
        for first, count, at in ((0, 40_000, 0), (8, 4096, 32), (4, 1001, 6))
    ),
    *(  # columns of a matrix: every line is cast and goes to a place of its own
        pytest.param(Block(64, 32, 8, width, lines, 4 * pitch, 2 * width + 16, width, ratio=2), id=f"cast-{lines}")
        for lines, width, pitch in ((3, 4096, 5000), (5, 24, 40), (7, 34, 51), (2, 140_000, 70_016))
    ),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_kernel_copies_casts_and_hashes_like_plain_torch(block: Block, device: str) -> None:
    place = torch.device(device)
    source = torch.randint(1, 256, (1 << 21,), dtype=torch.uint8).to(device)
    if block.ratio == 2:
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
    held = bytes(flat.tolist())
    for _ in range(150):
        width, lines = chance.choice((1, 7, 8, 24, 33, 200)), chance.choice((1, 1, 2, 9, 20))
        strides = [width + chance.choice((0, 0, 1, 3, 4, 8)) for _ in range(2)]
        start, position = chance.randrange(64), chance.choice((0, 8, 16, chance.randrange(1 << 20)))
        block = Block(0, 0, position, width, lines, strides[0], 0, strides[1])
        data = b"".join(held[start + line * strides[0] :][:width] for line in range(lines))
        places = [position + line * strides[1] + byte for line in range(lines) for byte in range(width)]
        assert plain.hash_block(flat, start, block).item() == hash_of_words(data, places), block


CPU = torch.device("cpu")
WORLD = 2


def shard(
    name: str, mine: torch.Tensor, dtype: str, lengths: tuple[int, ...], unseen: int = 0, copied: bool = False,
    **more: Any,
) -> Shard:  # fmt: skip
    """A base whose last ``unseen`` elements belong to no tensor, as an FSDP1 flat parameter's padding does."""
    numel = sum(lengths) - unseen
    views = (View(f"{name}.a", (numel // 2,), 0, numel // 2), View(f"{name}.b", (numel // 2,), numel // 2, numel // 2))
    base = Base(name, dtype, getattr(torch, dtype).itemsize, lengths, views)
    return Shard(base, mine.clone if copied else lambda: mine, run=None if copied else mine, **more)


def shards(rank: int, seed: int = 0) -> list[Shard]:
    generator = torch.Generator().manual_seed(10 * seed + rank)

    def make(numel: int) -> torch.Tensor:
        # exact in bf16: Triton's interpreter cuts where a GPU and torch round
        return torch.randn(numel, generator=generator).bfloat16().float()

    even, odd = (640, 640), (257, 255)
    plain_run = make(640).to(torch.bfloat16)
    return [
        shard("as-is", plain_run, "bfloat16", even),
        shard("cast", make(640), "bfloat16", even, unseen=40),
        shard("merged", make(odd[rank]), "bfloat16", odd, merge=lambda part, begin: part * 2 + begin),
        shard("kept", make(odd[rank]), "float32", odd),
        shard("other", make(640).to(torch.float16), "bfloat16", even),
        shard("whole", torch.arange(96), "int64", (96,)),
        shard("handed-out", make(640).to(torch.bfloat16), "bfloat16", even, copied=True),
        shard("unaligned", make(2 * 640)[1:641], "bfloat16", even),
    ]


@pytest.mark.parametrize(("bucket_bytes", "sharded"), [(1 << 20, False), (3000, True), (800, False), (800, True)])
def test_tables_pack_what_slices_pack(bucket_bytes: int, sharded: bool, device: str) -> None:
    plan = plan_buckets(tuple(shard.base for shard in shards(0)), bucket_bytes, sharded)
    numbers = numbers_of(bucket.entries for bucket in plan.buckets)
    for rank in range(WORLD):
        packer = Packer(CPU, plan, rank)
        for seed in range(2):  # other addresses each time
            mine, sums = shards(rank, seed), torch.zeros(len(numbers), dtype=torch.int64)
            packer.begin()
            for index, bucket in enumerate(plan.buckets):
                place = rank if bucket.world > 1 else 0
                origin, staged = (place * bucket.stride, bucket.stride) if sharded else (0, bucket.nbytes)
                memory, expected = (torch.zeros(staged + 16, dtype=torch.uint8) for _ in range(2))
                memory, expected = (m[-m.data_ptr() % 16 :][:staged] for m in (memory, expected))
                packer.pack(index, memory, mine)
                pack_slices(expected.narrow(0, place * bucket.stride - origin, bucket.stride), bucket.slices, mine)
                for hull in extents_of(bucket.entries, place * bucket.stride, (place + 1) * bucket.stride):
                    part = slice(hull.first - origin, hull.end - origin)
                    assert torch.equal(memory[part], expected[part]), (bucket.entries, hull)
                    block = Block(0, 0, bucket.first + hull.first, hull.end - hull.first)
                    sums[numbers[hull.names[0]]] += plain.hash_block(expected[part].clone(), 0, block)
            assert torch.equal(packer.sums(), sums) and packer.broken() == []


@pytest.mark.parametrize("chunk", [64, 100, 250])
def test_what_is_merged_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []

    def note(part: torch.Tensor, begin: int) -> torch.Tensor:
        merged.append(part.numel())
        return 2 * part + torch.arange(begin, begin + part.numel())

    run = torch.arange(640, dtype=torch.float32)
    mine = [shard("merged", run, "float32", (640,), merge=note)]
    plan = plan_buckets((mine[0].base,), 1 << 20)
    whole, parts = (torch.zeros(plan.buckets[0].nbytes, dtype=torch.uint8) for _ in range(2))
    pack_slices(whole, plan.buckets[0].slices, mine)
    monkeypatch.setattr(packing, "MERGE_CHUNK", chunk)
    monkeypatch.setattr(packing, "LONGEST_CHUNK", chunk + chunk // 2)
    pack_slices(parts, plan.buckets[0].slices, mine)
    assert torch.equal(parts, whole) and torch.equal(parts.view(torch.float32)[:640], 3 * run)
    assert merged[0] == sum(merged[1:]) == 640 and max(merged[1:]) <= chunk + chunk // 2
    assert min(merged[1:]) > chunk // 2, "a short rest by itself"


# What is not finite

LENGTHS = (5007, 5)
NAN, INF = float("nan"), float("inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def packer_of(shards: list[Shard], rank: int = 0, bucket_bytes: int = 1 << 20, device: str = "cpu") -> Packer:
    return Packer(torch.device(device), plan_buckets(tuple(shard.base for shard in shards), bucket_bytes), rank)


def broken(packer: Packer, shards: list[Shard], device: str = "cpu") -> list[str]:
    """Packs every bucket into memory full of NaN, as staging memory may be; returns the tensors that are broken."""
    packer.begin()
    for index, bucket in enumerate(packer.plan.buckets):
        packer.pack(index, torch.full((bucket.nbytes,), 255, dtype=torch.uint8, device=device), shards)
    return packer.broken()


# Trained as, sent as, and values; the most of float16 is 65504
CASES = [
    (FP32, BF16, (NAN, INF, -INF)),
    (FP32, BF16, (3.4e38,)),
    (BF16, FP16, (65536.0,)),
    *((dtype, dtype, (NAN, INF)) for dtype in (torch.float64, FP32, FP16, BF16)),
]


@pytest.mark.parametrize("device", ["by_plain", "by_kernel"], indirect=True)
@pytest.mark.parametrize(("trained", "wire", "values"), CASES)
def test_what_is_not_finite_on_the_wire_is_found_and_named(
    trained: torch.dtype, wire: torch.dtype, values: tuple[float, ...], device: str
) -> None:
    """In each sync another element is broken, and the one of the sync before is whole again; integers have no say."""
    if os.environ.get("TRITON_INTERPRET") == "1" and values == (3.4e38,):
        pytest.skip("the interpreter cuts where a GPU rounds")
    finite = torch.finfo(wire).min if trained == wire else 1.0
    for rank, places in ((0, (0, 4099, LENGTHS[0] - 1)), (1, (LENGTHS[1] - 1,))):
        runs = {key: torch.full((LENGTHS[rank],), finite, dtype=trained, device=device) for key in "abc"}
        mine = [shard(key, run, str(wire).removeprefix("torch."), LENGTHS) for key, run in runs.items()]
        mine.append(shard("count", torch.full((96,), -1, device=device), "int64", (96,)))
        packer = packer_of(mine, rank, 12_000 * wire.itemsize, device)
        assert broken(packer, mine, device) == []
        for at, value in zip(places, itertools.cycle(values), strict=False):
            runs["b"][at] = value
            assert broken(packer, mine, device) == ["b.b" if at or rank else "b.a"]
            runs["b"][at] = 1
        assert broken(packer, mine, device) == [], "what the sync before found is forgotten"


def test_what_a_merge_makes_infinite_is_named() -> None:
    mine = [shard("a", torch.ones(640), "bfloat16", (640,), merge=lambda part, begin: part / (torch.arange(640) - 400))]
    assert broken(packer_of(mine), mine) == ["a.b"]
