# SPDX-License-Identifier: Apache-2.0
"""A NaN or Inf in what was packed is found and the parameter named; what lies between the runs does not matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Bucket, Shard, Slice, View
from verl_sync_plugin.trainers.base import ParameterSource, name_culprit

LENGTHS = (5007, 5)
NAN, INF = float("nan"), float("inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class OneFactor(ParameterSource):
    """Every merge takes the same factor."""

    factor = torch.ones(3)

    def shards(self) -> list[Shard]:
        return []

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        return [("a.lora_A", lambda: self.factor)] if bases else []


def shards_of(runs: dict[str, torch.Tensor], wire: torch.dtype = BF16) -> list[Shard]:
    numel, name = sum(LENGTHS), str(wire).removeprefix("torch.")
    return [
        Shard(Base(key, name, wire.itemsize, LENGTHS, (View(key, (numel,), 0, numel),)), partial(lambda run: run, run))
        for key, run in runs.items()
    ]


def packer_of(shards: list[Shard], rank: int = 0, bucket_bytes: int = 1 << 20, device: str = "cpu") -> Packer:
    return Packer(torch.device(device), plan_buckets(tuple(shard.base for shard in shards), bucket_bytes), rank)


def broken(packer: Packer, shards: list[Shard], device: str = "cpu") -> list[Bucket]:
    """Packs every bucket into memory full of NaN, as staging memory may be; returns those that are broken."""
    packer.begin()
    for index, bucket in enumerate(packer.plan.buckets):
        packer.pack(index, torch.full((bucket.nbytes,), 255, dtype=torch.uint8, device=device), shards)
    return [packer.plan.buckets[index] for index in packer.broken()]


CASES = [
    *((FP32, BF16, value, "holds NaN or Inf in the trainer") for value in (NAN, INF, -INF)),
    (FP32, BF16, 3.4e38, "exceeds the range of bfloat16"),
    (BF16, FP16, 65536.0, "exceeds the range of float16"),  # the most is 65504
    *((dtype, dtype, NAN, "holds NaN or Inf") for dtype in (torch.float64, FP32, FP16, BF16)),
]


def found_and_named(
    device: str, bucket_elements: int, trained: torch.dtype, wire: torch.dtype, value: float, said: str
) -> None:
    for rank, at in ((0, 0), (0, 4099), (0, LENGTHS[0] - 1), (1, LENGTHS[1] - 1)):
        finite = torch.finfo(wire).min if trained == wire else 1.0
        runs = {key: torch.full((LENGTHS[rank],), finite, dtype=trained, device=device) for key in "abc"}
        shards = shards_of(runs, wire)
        packer = packer_of(shards, rank, bucket_elements * wire.itemsize, device)
        assert broken(packer, shards, device) == []
        runs["b"][at] = value
        for _ in range(2):
            (bucket,) = broken(packer, shards, device)
            text = name_culprit(bucket, shards, OneFactor(), rank)
            assert text is not None and text.startswith(f"'b' {said}")
        runs["b"][at] = 1
        assert broken(packer, shards, device) == [], "what the sync before found is forgotten"


@pytest.mark.parametrize("bucket_elements", [12_000, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_on_the_wire_is_found_and_named(
    bucket_elements: int, case: tuple[torch.dtype, torch.dtype, float, str]
) -> None:
    found_and_named("cpu", bucket_elements, *case)


# Triton's interpreter cuts where a GPU rounds
@pytest.mark.parametrize("case", [case for case in CASES if case[2] != 3.4e38])
def test_the_kernel_finds_what_is_not_finite(case: tuple[torch.dtype, torch.dtype, float, str], device: str) -> None:
    found_and_named(device, 1 << 20, *case)


def test_integers_have_no_say() -> None:
    shards = shards_of({"count": torch.full((LENGTHS[0],), -1, dtype=torch.int64)}, torch.int64)
    assert broken(packer_of(shards), shards) == []


def test_a_factor_is_named() -> None:
    (shard,) = shards_of({"a": torch.ones(LENGTHS[0])})
    factor, source = torch.tensor([1.0, NAN]), OneFactor()
    shards = [Shard(shard.base, shard.local, lambda part, begin: part * factor[1])]
    (bucket,) = broken(packer_of(shards), shards)
    assert "one of ['a'] is NaN or Inf once" in str(name_culprit(bucket, shards, source, 0))
    source.factor = factor
    assert name_culprit(bucket, shards, source, 0) == "'a.lora_A' holds NaN or Inf in the trainer"


def test_a_parameter_in_shares_is_named_by_its_share() -> None:
    q = View("q", (4,), 0, 4, None, (Run(0, 0, 2, 2, 6, 2),))
    v = View("v", (2,), 0, 2, None, (Run(4, 0, 1, 2, 6, 1),))
    run = torch.zeros(12)
    shard = Shard(Base("qkv", "bfloat16", 2, (12,), (q, v)), lambda: run)
    bucket = Bucket(1, 32, (Slice(0, 0, 12, 0),), ())
    for element, name in ((7, "q"), (10, "v"), (11, "qkv")):
        run.zero_()[element] = NAN
        assert name_culprit(bucket, [shard], OneFactor(), 0) == f"{name!r} holds NaN or Inf in the trainer"
