# SPDX-License-Identifier: Apache-2.0
"""Packing by tables (in Triton's interpreter) gives the bytes that packing one slice after another gives."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_sync_plugin.copies import packing, plain
from verl_sync_plugin.copies.packing import Packer, pack_slices
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View, hulls_of, numbers_of

CPU = torch.device("cpu")
WORLD = 2


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's tables, on the CPU; see ``test_copies.test_kernel_in_the_interpreter``."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs again in a process of its own")
    monkeypatch.setattr(packing, "kernel_works", lambda device: True)


def shard(
    name: str,
    mine: torch.Tensor,
    dtype: str,
    lengths: tuple[int, ...],
    unseen: int = 0,
    copied: bool = False,
    **more: Any,
) -> Shard:
    """A base whose last ``unseen`` elements belong to no tensor, as an FSDP1 flat parameter's padding does."""
    numel = sum(lengths) - unseen
    views = (View(f"{name}.a", (numel // 2,), 0, numel // 2), View(f"{name}.b", (numel // 2,), numel // 2, numel // 2))
    base = Base(name, dtype, getattr(torch, dtype).itemsize, lengths, views)
    return Shard(base, mine.clone if copied else lambda: mine, **more)


def double(part: torch.Tensor, begin: int) -> torch.Tensor:
    return part * 2 + begin


def shards(rank: int, seed: int = 0) -> list[Shard]:
    generator = torch.Generator().manual_seed(10 * seed + rank)

    def make(numel: int) -> torch.Tensor:
        # exact in bf16: Triton's interpreter cuts where a GPU and torch round
        return torch.randn(numel, generator=generator).bfloat16().float()

    even, odd = (640, 640), (257, 255)
    plain_run = make(640).to(torch.bfloat16)
    return [
        shard("as-is", plain_run, "bfloat16", even, run=plain_run),
        shard("cast", make(640), "bfloat16", even, unseen=40),
        shard("merged", make(odd[rank]), "bfloat16", odd, merge=double),
        shard("kept", make(odd[rank]), "float32", odd),
        shard("other", make(640).to(torch.float16), "bfloat16", even),
        shard("whole", torch.arange(96), "int64", (96,)),
        shard("handed-out", make(640).to(torch.bfloat16), "bfloat16", even, copied=True),
        shard("unaligned", make(2 * 640)[1:641], "bfloat16", even),
    ]


def planned(bucket_bytes: int, sharded: bool = False) -> Plan:
    return plan_buckets(tuple(shard.base for shard in shards(0)), bucket_bytes, sharded)


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 3000, 800])
def test_tables_pack_what_slices_pack(rank: int, bucket_bytes: int, sharded: bool, interpreted: None) -> None:
    packer = Packer(CPU, planned(bucket_bytes, sharded), rank)
    numbers = numbers_of(bucket.entries for bucket in packer.plan.buckets)
    for seed in range(3):  # other addresses each time
        mine, sums = shards(rank, seed), torch.zeros(len(numbers), dtype=torch.int64)
        packer.begin()
        for index, bucket in enumerate(packer.plan.buckets):
            place = rank if bucket.world > 1 else 0
            origin, staged = (place * bucket.stride, bucket.stride) if sharded else (0, bucket.nbytes)
            memory, expected = (torch.zeros(staged + 16, dtype=torch.uint8) for _ in range(2))
            memory, expected = (m[-m.data_ptr() % 16 :][:staged] for m in (memory, expected))
            packer.pack(index, memory, mine)
            pack_slices(expected.narrow(0, place * bucket.stride - origin, bucket.stride), bucket.slices, mine)
            for hull in hulls_of(bucket.entries, place * bucket.stride, (place + 1) * bucket.stride):
                part = slice(hull.first - origin, hull.end - origin)
                assert torch.equal(memory[part], expected[part]), (bucket.entries, hull)
                sums[numbers[hull.names[0]]] += plain.hash_bytes(expected[part].clone(), hull.first)
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


@pytest.mark.parametrize("name", ["as-is", "cast", "merged", "kept", "other", "handed-out", "unaligned"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_tables_find_what_is_not_finite(name: str, value: float, interpreted: None) -> None:
    """Whichever way a shard is packed; the bucket is named that holds the spot."""
    packer, mine = Packer(CPU, planned(800), 0), shards(0)
    place = [part.base.key for part in mine].index(name)
    run = mine[place].local()
    run[200] = value
    if name == "handed-out":
        mine[place] = replace(mine[place], local=run.clone)
    for _ in range(2):  # a broken sync leaves no traces
        packer.begin()
        for index, bucket in enumerate(packer.plan.buckets):
            packer.pack(index, torch.zeros(bucket.nbytes, dtype=torch.uint8), mine)
        parts = [part for index in packer.broken() for part in packer.plan.buckets[index].slices]
        assert any(part.begin <= 200 < part.end for part in parts if part.base == place)
    packer.begin()
    assert packer.broken() == []
