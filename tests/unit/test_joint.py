# SPDX-License-Identifier: Apache-2.0
"""Planner and assembler for a model whose parts different ranks hold: every element arrives once and in its place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Plan, View
from verl_sync_plugin.receiver.assembly import Assembler

GARBAGE = 0xEE
DTYPES = {"bfloat16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True)
class Parameter:
    """``rows`` rows of all parts together make a tensor; the parts lie side by side (along dimension 1)."""

    name: str
    owners: tuple[int, ...]
    rows: int
    columns: int
    dtype: str


def bases_of(parameter: Parameter, world: int) -> list[Base]:
    p, parts = parameter, len(parameter.owners)
    numel, whole = p.rows * p.columns, p.rows * p.columns * parts
    found = []
    for part, owner in enumerate(p.owners):
        lengths = tuple(numel if rank == owner else 0 for rank in range(world))
        steps = (p.rows, p.columns, p.columns * parts) if p.rows > 1 else (1, 0, 0)
        share = Run(0, part * p.columns, p.columns, *steps)
        view = View(p.name, (p.rows, p.columns * parts), 0, whole, None, (share,))
        found.append(Base(f"{p.name}.{part}", p.dtype, DTYPES[p.dtype], lengths, (view,)))
    return found


def content(base: int, nbytes: int) -> torch.Tensor:
    return ((torch.arange(nbytes) * 7 + base * 31) % 251).to(torch.uint8)


def ship(plan: Plan, world: int) -> dict[str, torch.Tensor]:
    """All tensors as the engine's assembler makes them; the slot is overwritten after each bucket."""
    assembler = Assembler()
    got: dict[str, torch.Tensor] = {}
    # Not at the start of its storage, as the second slot
    memory = torch.empty(plan.slot_bytes + 16, dtype=torch.uint8)[16:]
    for bucket in plan.buckets:
        memory.fill_(GARBAGE)
        ends = [0] * world
        for part in sorted(bucket.slices, key=lambda part: part.offset):
            base = plan.bases[part.base]
            (owner,) = (rank for rank, length in enumerate(base.lengths) if length)
            run = content(part.base, base.numel * base.itemsize)[part.begin * base.itemsize : part.end * base.itemsize]
            assert part.offset >= ends[owner] and part.offset % ALIGNMENT == 0, "slices overlap"
            ends[owner] = part.offset + len(run)
            assert ends[owner] <= bucket.stride
            memory.narrow(0, owner * bucket.stride + part.offset, len(run)).copy_(run)
        for name, tensor in assembler.tensors(BucketMemory([memory], bucket.stride, world), bucket.entries):
            assert name not in got
            got[name] = tensor.clone()
    assembler.finish()
    return got


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Parameter], int, int]:
    world = draw(st.integers(1, 4))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    sizes = (st.integers(1, 9), st.integers(1, 40))
    drawn = draw(st.lists(st.tuples(ranks, *sizes, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=12))
    parameters = [Parameter(f"w{i}", tuple(o), r, c, d) for i, (o, r, c, d) in enumerate(drawn)]
    return parameters, world, draw(st.integers(ALIGNMENT * world, 2000))


@settings(max_examples=200, deadline=None)
@given(models())
def test_every_element_arrives_once_and_in_place(model: tuple[list[Parameter], int, int]) -> None:
    parameters, world, bucket_bytes = model
    bases = tuple(base for parameter in parameters for base in bases_of(parameter, world))
    plan = plan_buckets(bases, bucket_bytes)
    got = ship(plan, world)
    index = 0
    for p in parameters:
        parts = []
        for _ in p.owners:
            flat = content(index, p.rows * p.columns * DTYPES[p.dtype])
            parts.append(flat.view(getattr(torch, p.dtype)).view(p.rows, p.columns))
            index += 1
        assert torch.equal(got[p.name].view(torch.uint8), torch.cat(parts, dim=1).view(torch.uint8)), p
        assert got[p.name].shape == (p.rows, p.columns * len(p.owners))
    assert plan.tensor_count == len(parameters) == len(got)
    assert all(bucket.nbytes <= bucket_bytes and bucket.slices for bucket in plan.buckets)
    assert plan == plan_buckets(tuple(bases), bucket_bytes), "planning is not deterministic"


@settings(max_examples=100, deadline=None)
@given(models())
def test_only_what_fits_no_bucket_is_torn(model: tuple[list[Parameter], int, int]) -> None:
    parameters, world, bucket_bytes = model
    bases = tuple(base for parameter in parameters for base in bases_of(parameter, world))
    capacity = bucket_bytes // world // ALIGNMENT * ALIGNMENT
    times: dict[str, int] = {}
    for bucket in plan_buckets(bases, bucket_bytes).buckets:
        for entry in bucket.entries:
            times[entry.name] = times.get(entry.name, 0) + 1
    for p in parameters:
        if p.rows * p.columns * DTYPES[p.dtype] <= capacity:
            assert times[p.name] == 1, p


def dense(name: str, owners: tuple[int, ...], nbytes: int = 64) -> Parameter:
    return Parameter(name, owners, 1, nbytes, "uint8")


def test_stages_fill_the_same_bucket() -> None:
    """Two pipeline stages of two tensor-parallel ranks: no rank's segment stays empty."""
    layers = [dense(f"layer{i}", (0, 1)) for i in range(4)] + [dense(f"layer{i}", (2, 3)) for i in range(4, 8)]
    plan = plan_buckets(tuple(base for layer in layers for base in bases_of(layer, 4)), 4 * 128)
    assert len(plan.buckets) == 2 and plan.nbytes == 8 * 2 * 64, "padding"
    for bucket in plan.buckets:
        assert {entry.name for entry in bucket.entries} & {f"layer{i}" for i in range(4)}
        assert {entry.name for entry in bucket.entries} & {f"layer{i}" for i in range(4, 8)}


def test_a_large_parameter_of_one_rank_travels_beside_the_others() -> None:
    large, small = dense("embedding", (0,), 1000), [dense(f"w{i}", (1,), 100) for i in range(10)]
    plan = plan_buckets(tuple(base for p in (large, *small) for base in bases_of(p, 2)), 2 * 112)
    assert len(plan.buckets) == 10, "its pieces and the other rank's parameters share the buckets"


def test_tensor_of_two_parameters_is_refused() -> None:
    first, second = bases_of(dense("w", (0,)), 2), bases_of(dense("w", (0,)), 2)
    between = bases_of(dense("v", (1,)), 2)
    with pytest.raises(ValueError, match="both named 'w'"):
        plan_buckets((*first, *between, *second), 1024)


def test_bucket_too_small_for_the_ranks() -> None:
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes"):
        plan_buckets(tuple(bases_of(dense("w", (0,)), 4)), 63)


def test_no_parameters_no_buckets() -> None:
    plan = plan_buckets((), 64)
    assert (plan.buckets, plan.slot_bytes, plan.tensor_count) == ((), 0, 0)
