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
from verl_sync_plugin.layout.tensors import Base, Bucket, Plan, Shard, Slice, View
from verl_sync_plugin.trainers.base import ParameterSource, name_culprit

LENGTHS = (7, 5)


class OneFactor(ParameterSource):
    """Every merge takes the same factor."""

    factor = torch.ones(3)

    def shards(self) -> list[Shard]:
        return []

    def merged_with(self, bases: tuple[int, ...]) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        return [("a.lora_A", lambda: self.factor)] if bases else []


def shards_of(runs: dict[str, torch.Tensor], wire: torch.dtype = torch.bfloat16) -> list[Shard]:
    name = str(wire).removeprefix("torch.")
    return [
        Shard(Base(key, name, wire.itemsize, LENGTHS, (View(key, (12,), 0, 12),)), partial(lambda run: run, run))
        for key, run in runs.items()
    ]


def broken(plan: Plan, shards: list[Shard], rank: int) -> list[int]:
    """Packs every bucket into memory full of NaN, as staging memory may be, and asks which are broken."""
    packer = Packer(torch.device("cpu"), plan, rank)
    for _ in range(2):  # what the sync before found is forgotten
        packer.begin()
        for index, bucket in enumerate(plan.buckets):
            packer.pack(index, torch.full((bucket.nbytes,), 255, dtype=torch.uint8), shards)
    return packer.broken()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [48, 1 << 20])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_what_is_not_finite_on_the_wire_is_found_and_named(rank: int, bucket_bytes: int, value: float) -> None:
    runs = {key: torch.randn(LENGTHS[rank]) for key in "abc"}
    shards = shards_of(runs)
    plan = plan_buckets(tuple(shard.base for shard in shards), bucket_bytes)
    assert broken(plan, shards, rank) == []
    runs["b"][LENGTHS[rank] - 1] = value
    (index,) = broken(plan, shards, rank)
    text = name_culprit(plan.buckets[index], shards, OneFactor(), rank)
    expected = "exceeds the range of bfloat16" if value == 3.4e38 else "holds NaN or Inf"
    assert text.startswith(f"'b' {expected}")


def test_what_the_dtype_of_the_trainer_rounds_its_limit_to_is_named() -> None:
    shards = shards_of({"a": torch.full((7,), 65536.0, dtype=torch.bfloat16)}, torch.float16)  # the most is 65504
    plan = plan_buckets((shards[0].base,), 1 << 20)
    (index,) = broken(plan, shards, 0)
    text = name_culprit(plan.buckets[index], shards, OneFactor(), 0)
    assert text is not None and text.startswith("'a' exceeds the range of float16")


def test_a_factor_is_named() -> None:
    shard = shards_of({"a": torch.ones(7)})[0]
    factor = torch.tensor([1.0, float("nan")])

    def merge(part: torch.Tensor, begin: int) -> torch.Tensor:
        return part * factor[1]

    shards = [Shard(shard.base, shard.local, merge)]
    plan = plan_buckets((shard.base,), 1 << 20)
    (index,) = broken(plan, shards, 0)
    source = OneFactor()
    assert "one of ['a'] is NaN or Inf once" in name_culprit(plan.buckets[index], shards, source, 0)
    source.factor = factor
    assert name_culprit(plan.buckets[index], shards, source, 0) == "'a.lora_A' holds NaN or Inf in the trainer"


def test_integers_and_the_sync_before_have_no_say() -> None:
    shards = shards_of({"count": torch.full((7,), -1, dtype=torch.int64)}, torch.int64)
    assert broken(plan_buckets(tuple(shard.base for shard in shards), 1 << 20), shards, 0) == []
    run = torch.full((7,), float("nan"))
    bad = shards_of({"a": run})
    packer = Packer(torch.device("cpu"), plan_buckets((bad[0].base,), 1 << 20), 0)
    for value, found in ((float("nan"), [0]), (1.0, [])):
        run.fill_(value)
        packer.begin()
        packer.pack(0, torch.zeros(64, dtype=torch.uint8), bad)
        assert packer.broken() == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_every_floating_dtype_is_looked_at(dtype: torch.dtype) -> None:
    run = torch.ones(7, dtype=dtype)
    shards = shards_of({"a": run}, dtype)
    plan = plan_buckets((shards[0].base,), 1 << 20)
    assert broken(plan, shards, 0) == []
    run[6] = float("nan")
    assert broken(plan, shards, 0) == [0]


def test_a_parameter_in_shares_is_named_by_its_share() -> None:
    q = View("q", (4,), 0, 4, None, (Run(0, 0, 2, 2, 6, 2),))
    v = View("v", (2,), 0, 2, None, (Run(4, 0, 1, 2, 6, 1),))
    run = torch.zeros(12)
    base = Base("qkv", "bfloat16", 2, (12,), (q, v))
    shard = Shard(base, partial(lambda held: held, run))
    bucket = Bucket(1, 32, (Slice(0, 0, 12, 0),), ())
    for element, name in ((7, "q"), (10, "v"), (11, "qkv")):
        run.zero_()[element] = float("nan")
        assert name_culprit(bucket, [shard], OneFactor(), 0) == f"{name!r} holds NaN or Inf in the trainer"
