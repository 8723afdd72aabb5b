# SPDX-License-Identifier: Apache-2.0
"""The planner, against a simulation of ranks that fill their segments and a receiver that cuts them up again: bases
that all ranks share, and then parts that different ranks hold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.copies.copier import BucketMemory
from verl_sync_plugin.engine.load import Assembler
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Bucket, Entry, Hull, Plan, View, hulls_of, numbers_of

SIZES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
GARBAGE = 0xEE


def chunk_lengths(rows: int, world: int, row: int) -> tuple[int, ...]:
    """Elements per rank as ``torch.chunk`` cuts rows."""
    step = max(-(-rows // world), 1)
    return tuple(max(min(step, rows - rank * step), 0) * row for rank in range(world))


def cut_into_views(draw: st.DrawFn, key: str, numel: int) -> tuple[View, ...]:
    """Views one after another, some padding between them, some aliased, some strided."""
    views: list[View] = []
    at = 0
    while at < numel:
        span = draw(st.integers(1, numel - at))
        kind = draw(st.sampled_from(["view", "view", "gap", "alias", "strided"]))
        if kind == "strided" and span >= 3:
            views.append(View(f"{key}.{at}", (2, 1), at, span, (span - 1, 1)))
        elif kind != "gap":
            views.append(View(f"{key}.{at}", (span,), at, span))
        if kind == "alias":
            views.append(View(f"{key}.{at}.alias", (span,), at, span))
        at += span
    return tuple(views)


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Base, ...], int]:
    """(bases, bucket_bytes): sharded evenly, like ``torch.chunk``, arbitrarily, or replicated."""
    world = draw(st.integers(1, 8))
    bases = []
    for index in range(draw(st.integers(1, 5))):
        itemsize = draw(st.sampled_from(sorted(SIZES)))
        match draw(st.sampled_from(["chunk", "arbitrary", "replicated"])):
            case "chunk":
                lengths = chunk_lengths(draw(st.integers(0, 20)), world, draw(st.integers(1, 9)))
            case "arbitrary":
                lengths = tuple(draw(st.lists(st.integers(0, 60), min_size=world, max_size=world)))
            case _:
                lengths = (draw(st.integers(0, 120)),)
        views = cut_into_views(draw, f"base{index}", sum(lengths))
        bases.append(Base(f"base{index}", SIZES[itemsize], itemsize, lengths, views))
    return tuple(bases), draw(st.integers(ALIGNMENT * world, 1500))


def content(base: Base, index: int) -> bytes:
    """Bytes of a whole base, different at every place."""
    return bytes((7 * position + 31 * index + position // 251) % 256 for position in range(base.numel * base.itemsize))


def gathered(plan: Plan, bucket: Bucket, data: list[bytes]) -> bytes:
    """What the all-gather of one bucket leaves: the segments of all ranks; checks that slices do not overlap."""
    segments = []
    for rank in range(bucket.world):
        segment = bytearray([GARBAGE] * bucket.stride)
        end_of_last = 0
        for part in sorted(bucket.slices, key=lambda part: part.offset):
            base = plan.bases[part.base]
            assert part.offset % ALIGNMENT == 0
            first = sum(base.lengths[:rank]) + part.begin
            stop = sum(base.lengths[:rank]) + min(part.end, base.lengths[rank])
            if stop <= first:
                continue
            assert part.offset >= end_of_last, "slices overlap"
            end_of_last = part.offset + (stop - first) * base.itemsize
            run = data[part.base][first * base.itemsize : stop * base.itemsize]
            segment[part.offset : part.offset + len(run)] = run
        assert end_of_last <= bucket.stride
        segments.append(bytes(segment))
    return b"".join(segments)


def received(plan: Plan) -> tuple[dict[str, bytes], dict[str, Counter[int]]]:
    """Every tensor put together from all buckets, and how often each of its bytes arrived."""
    data = [content(base, index) for index, base in enumerate(plan.bases)]
    tensors: dict[str, bytearray] = {}
    arrivals: dict[str, Counter[int]] = {}
    for bucket in plan.buckets:
        memory = gathered(plan, bucket, data)
        for entry in bucket.entries:
            tensor = tensors.setdefault(entry.name, bytearray(entry.nbytes))
            assert [piece.target for piece in entry.pieces] == sorted(piece.target for piece in entry.pieces)
            for piece in entry.pieces:
                tensor[piece.target : piece.target + piece.width] = memory[piece.source : piece.source + piece.width]
                places = range(piece.target, piece.target + piece.width)
                arrivals.setdefault(entry.name, Counter()).update(places)
    return {name: bytes(tensor) for name, tensor in tensors.items()}, arrivals


@settings(max_examples=150, deadline=None)
@given(models())
def test_every_byte_arrives_once_and_in_place(model: tuple[tuple[Base, ...], int]) -> None:
    bases, bucket_bytes = model
    plan = plan_buckets(bases, bucket_bytes)
    tensors, arrivals = received(plan)
    expected = {}
    for index, base in enumerate(bases):
        data = content(base, index)
        for view in base.views:
            expected[view.name] = data[view.start * base.itemsize : (view.start + view.span) * base.itemsize]
    assert tensors == expected
    for name, value in expected.items():
        assert arrivals[name] == Counter(range(len(value))), name


@settings(max_examples=150, deadline=None)
@given(models())
def test_bounds_and_metadata(model: tuple[tuple[Base, ...], int]) -> None:
    bases, bucket_bytes = model
    plan = plan_buckets(bases, bucket_bytes)
    described = {view.name: (base.dtype, view.shape, view.strides) for base in bases for view in base.views}
    for bucket in plan.buckets:
        assert bucket.slices, "an empty bucket"
        assert bucket.nbytes == bucket.world * bucket.stride <= bucket_bytes
        assert bucket.stride % ALIGNMENT == 0
        assert {len(plan.bases[part.base].lengths) for part in bucket.slices} == {bucket.world}
        for entry in bucket.entries:
            assert (entry.dtype, entry.shape, entry.strides) == described[entry.name]
    assert plan.slot_bytes == max((bucket.nbytes for bucket in plan.buckets), default=0)
    assert plan.nbytes == sum(bucket.nbytes for bucket in plan.buckets)
    assert plan.tensor_count == len(described)
    assert plan == plan_buckets(tuple(bases), bucket_bytes), "planning is not deterministic"


def simple(name: str = "w", numel: int = 8, dtype: str = "bfloat16", shape: tuple[int, ...] = (8,)) -> Base:
    return Base(name, dtype, 2, (numel,), (View(name, shape, 0, numel),))


@pytest.mark.parametrize(
    "other",
    [
        simple(shape=(2, 4)),
        simple(dtype="float16"),
        simple(name="v"),
        dataclasses.replace(simple(), lengths=(4, 4)),
        dataclasses.replace(simple(), views=(View("w", (8,), 0, 8, (1,)),)),
    ],
)
def test_digest_tells_layouts_apart(other: Base) -> None:
    assert plan_buckets((simple(),), 64).digest != plan_buckets((other,), 64).digest


@settings(max_examples=100, deadline=None)
@given(
    world=st.integers(1, 8),
    experts=st.integers(1, 24),
    span=st.integers(1, 30),
    spare=st.integers(0, 400),
    before=st.integers(0, 60),
)
def test_fused_experts_are_cut_between_experts(world: int, experts: int, span: int, spare: int, before: int) -> None:
    views = tuple(View(f"experts.{index}.weight", (span,), index * span, span) for index in range(experts))
    fused = Base("experts", "bfloat16", 2, chunk_lengths(experts, world, span), views)
    dense = Base("dense", "bfloat16", 2, chunk_lengths(before, world, 1), (View("dense", (before,), 0, before),))
    bases = (dense, fused) if before else (fused,)
    per_rank = -(-span * 2 // ALIGNMENT) * ALIGNMENT + spare
    plan = plan_buckets(bases, per_rank * world)
    whole = [entry for bucket in plan.buckets for entry in bucket.entries if entry.name.startswith("experts.")]
    assert sorted(entry.name for entry in whole) == sorted(view.name for view in views)
    assert all(sum(piece.width for piece in entry.pieces) == entry.nbytes == span * 2 for entry in whole)


def test_aliases_travel_once_under_both_names() -> None:
    views = (View("embed", (10, 4), 0, 40), View("head", (10, 4), 0, 40))
    plan = plan_buckets((Base("embed", "bfloat16", 2, (20, 20), views),), 1024)
    (bucket,) = plan.buckets
    assert [entry.name for entry in bucket.entries] == ["embed", "head"]
    assert bucket.entries[0].pieces == bucket.entries[1].pieces
    assert plan.nbytes == 96, "40 elements of 2 bytes once, padded to 48 per rank"


def test_replicated_bases_are_not_gathered() -> None:
    sharded = Base("w", "bfloat16", 2, (4, 4), (View("w", (8,), 0, 8),))
    plan = plan_buckets((simple("buffer"), sharded), 64)
    assert [(bucket.world, [entry.name for entry in bucket.entries]) for bucket in plan.buckets] == [
        (2, ["w"]),
        (1, ["buffer"]),
    ]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_bucket_too_small_for_the_ranks(world: int) -> None:
    base = Base("w", "bfloat16", 2, (1,) * world, (View("w", (world,), 0, world),))
    plan_buckets((base,), ALIGNMENT * world)
    with pytest.raises(ValueError, match=f"{ALIGNMENT * world - 1} bytes cannot serve {world} ranks") as caught:
        plan_buckets((base,), ALIGNMENT * world - 1)
    assert "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes" in str(caught.value)


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="both named 'w'"):
        plan_buckets((simple("w"), simple("v"), simple("w")), 64)


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


def ship(plan: Plan) -> dict[str, torch.Tensor]:
    """All tensors as the engine's assembler makes them; the slot is overwritten after each bucket."""
    data = [content(base, index) for index, base in enumerate(plan.bases)]
    assembler = Assembler()
    got: dict[str, torch.Tensor] = {}
    # Not at the start of its storage, as the second slot
    memory = torch.empty(plan.slot_bytes + 16, dtype=torch.uint8)[16:]
    for bucket in plan.buckets:
        arrived = torch.frombuffer(bytearray(gathered(plan, bucket, data)), dtype=torch.uint8)
        memory.fill_(GARBAGE)[: len(arrived)].copy_(arrived)
        for name, tensor in assembler.tensors(BucketMemory([memory], bucket.stride, bucket.world), bucket.entries):
            assert name not in got
            got[name] = tensor.clone()
    assembler.finish()
    return got


@st.composite
def joint_models(draw: st.DrawFn) -> tuple[list[Parameter], int, int]:
    world = draw(st.integers(1, 4))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    sizes = (st.integers(1, 9), st.integers(1, 40))
    drawn = draw(st.lists(st.tuples(ranks, *sizes, st.sampled_from(sorted(DTYPES))), min_size=1, max_size=12))
    parameters = [Parameter(f"w{i}", tuple(o), r, c, d) for i, (o, r, c, d) in enumerate(drawn)]
    return parameters, world, draw(st.integers(ALIGNMENT * world, 2000))


@settings(max_examples=150, deadline=None)
@given(joint_models())
def test_parts_of_different_ranks_arrive_once_and_in_place(model: tuple[list[Parameter], int, int]) -> None:
    parameters, world, bucket_bytes = model
    bases = tuple(base for parameter in parameters for base in bases_of(parameter, world))
    plan = plan_buckets(bases, bucket_bytes)
    got = ship(plan)
    index = 0
    for p in parameters:
        parts = []
        for _ in p.owners:
            flat = torch.frombuffer(bytearray(content(bases[index], index)), dtype=torch.uint8)
            parts.append(flat.view(getattr(torch, p.dtype)).view(p.rows, p.columns))
            index += 1
        assert torch.equal(got[p.name].view(torch.uint8), torch.cat(parts, dim=1).view(torch.uint8)), p
        assert got[p.name].shape == (p.rows, p.columns * len(p.owners))
    assert plan.tensor_count == len(parameters) == len(got)
    assert all(bucket.nbytes <= bucket_bytes and bucket.slices for bucket in plan.buckets)
    assert plan == plan_buckets(tuple(bases), bucket_bytes), "planning is not deterministic"


@settings(max_examples=100, deadline=None)
@given(joint_models())
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


def test_tensor_of_two_parameters_is_refused() -> None:
    first, second = bases_of(dense("w", (0,)), 2), bases_of(dense("w", (0,)), 2)
    between = bases_of(dense("v", (1,)), 2)
    with pytest.raises(ValueError, match="both named 'w'"):
        plan_buckets((*first, *between, *second), 1024)


def entry(name: str, *pieces: tuple[int, int]) -> Entry:
    parts = tuple(Run(offset, 0, nbytes) for offset, nbytes in pieces)
    return Entry(name, "uint8", (64,), None, 64, parts)


def test_hulls() -> None:
    entries = (
        entry("a", (0, 16), (64, 16)),
        entry("b", (16, 8)),
        entry("tied", (0, 16), (64, 16)),
        entry("c", (20, 9)),
    )
    assert hulls_of(entries) == [
        Hull(0, 16, ("a", "tied")),
        Hull(16, 29, ("b", "c"), equal=False),
        Hull(64, 80, ("a", "tied")),
    ]


def planned(sharded: bool) -> Plan:
    views = (View("w", (64,), 0, 64),)
    return plan_buckets((Base("w", "uint8", 1, (32, 32), views),), 64, sharded)


def test_a_sharded_bucket_is_bounded_by_what_a_rank_stages() -> None:
    gathered, sharded = planned(False), planned(True)
    assert (gathered.slot_bytes, gathered.buckets[0].nbytes) == (64, 64)
    assert (sharded.slot_bytes, sharded.buckets[0].nbytes) == (32, 64)
    assert gathered.digest != sharded.digest
    assert numbers_of(bucket.entries for bucket in sharded.buckets) == {"w": 0}
