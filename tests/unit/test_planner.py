# SPDX-License-Identifier: Apache-2.0
"""Checks the planner against a simulation of ranks that fill their segments and a receiver that cuts them up."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import ALIGNMENT, Base, Bucket, Plan, View
from verl_sync_plugin.trainers.megatron.parts import Part, RankLayout, match

SIZES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
GARBAGE = 0xEE


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


def parts_of(name: str, owners: tuple[int, ...], rows: int, columns: int, size: int, world: int) -> list[Base]:
    """A tensor whose parts, side by side along dimension 1, are held by a rank each."""
    numel, parts, found = rows * columns, len(owners), []
    for part, owner in enumerate(owners):
        lengths = tuple(numel if rank == owner else 0 for rank in range(world))
        steps = (rows, columns, columns * parts) if rows > 1 else (1, 0, 0)
        view = View(name, (rows, columns * parts), 0, numel * parts, None, (Run(0, part * columns, columns, *steps),))
        found.append(Base(f"{name}.{part}", SIZES[size], size, lengths, (view,)))
    return found


Model = tuple[tuple[Base, ...], int, int]  # bases, bytes of a bucket, ranks


@st.composite
def shared(draw: st.DrawFn) -> Model:
    """Bases sharded evenly, like ``torch.chunk``, arbitrarily, or replicated."""
    world = draw(st.integers(1, 8))
    bases = []
    for index in range(draw(st.integers(1, 5))):
        itemsize = draw(st.sampled_from(sorted(SIZES)))
        match draw(st.sampled_from(["chunk", "arbitrary", "replicated"])):
            case "chunk":
                rows, row = draw(st.integers(0, 20)), draw(st.integers(1, 9))
                step = max(-(-rows // world), 1)
                lengths = tuple(max(min(step, rows - rank * step), 0) * row for rank in range(world))
            case "arbitrary":
                lengths = tuple(draw(st.lists(st.integers(0, 60), min_size=world, max_size=world)))
            case _:
                lengths = (draw(st.integers(0, 120)),)
        views = cut_into_views(draw, f"base{index}", sum(lengths))
        bases.append(Base(f"base{index}", SIZES[itemsize], itemsize, lengths, views))
    return tuple(bases), draw(st.integers(ALIGNMENT * world, 1500)), world


@st.composite
def joint(draw: st.DrawFn) -> Model:
    """Parts that different ranks hold."""
    world = draw(st.integers(1, 4))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    drawn = st.tuples(ranks, st.integers(1, 9), st.integers(1, 40), st.sampled_from([1, 2, 4]))
    bases: list[Base] = []
    for number, (owners, *sizes) in enumerate(draw(st.lists(drawn, min_size=1, max_size=12))):
        bases += parts_of(f"w{number}", tuple(owners), *sizes, world)
    return tuple(bases), draw(st.integers(ALIGNMENT * world, 2000)), world


def content(base: Base, index: int) -> bytes:
    """Bytes of a whole base, different at every place."""
    return bytes((7 * position + 31 * index + position // 251) % 256 for position in range(base.numel * base.itemsize))


def gathered(plan: Plan, bucket: Bucket, data: list[bytes]) -> bytes:
    """Returns the segments of all ranks, as one bucket's all-gather leaves them; checks that slices do not overlap."""
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


def expected_of(bases: tuple[Base, ...]) -> dict[str, bytes]:
    """Every tensor, put together from the parts of its bases."""
    found: dict[str, bytearray] = {}
    for index, base in enumerate(bases):
        data, size = content(base, index), base.itemsize
        for view in base.views:
            tensor = found.setdefault(view.name, bytearray(view.span * size))
            for run in (plain for share in view.runs for plain in share.repeats()):
                held = data[run.source * size : (run.source + run.width) * size]
                tensor[run.target * size : (run.target + run.width) * size] = held
    return {name: bytes(tensor) for name, tensor in found.items()}


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
            for piece in (plain for each in entry.pieces for plain in each.repeats()):
                tensor[piece.target : piece.target + piece.width] = memory[piece.source : piece.source + piece.width]
                places = range(piece.target, piece.target + piece.width)
                arrivals.setdefault(entry.name, Counter()).update(places)
    return {name: bytes(tensor) for name, tensor in tensors.items()}, arrivals


@settings(max_examples=120, deadline=None)
@given(shared() | joint())
def test_every_byte_arrives_once_and_in_place_within_bounds(model: Model) -> None:
    bases, bucket_bytes, _ = model
    plan, expected = plan_buckets(bases, bucket_bytes), expected_of(bases)
    tensors, arrivals = received(plan)
    assert tensors == expected
    assert arrivals == {name: Counter(range(len(value))) for name, value in expected.items() if value}
    described = {view.name: (base.dtype, view.shape, view.strides) for base in bases for view in base.views}
    travels: Counter[int] = Counter()
    for bucket in plan.buckets:
        assert bucket.slices, "an empty bucket"
        assert bucket.nbytes == bucket.world * bucket.stride <= bucket_bytes and bucket.stride % ALIGNMENT == 0
        assert {len(plan.bases[part.base].lengths) for part in bucket.slices} == {bucket.world}, "a replica travels"
        for part in bucket.slices:
            base = plan.bases[part.base]
            torn = part.end % 128 if part.end < max(base.lengths) else 0
            assert not torn or (part.end - part.begin <= torn and not part.offset), "torn in a block of fp8"
            travels[part.base] += sum(max(part.count(base, rank), 0) for rank in range(bucket.world))
        assert all((each.dtype, each.shape, each.strides) == described[each.name] for each in bucket.entries)
    assert travels == {n: base.numel for n, base in enumerate(bases) if base.numel}, "also what has two names"
    assert plan.slot_bytes == max((bucket.nbytes for bucket in plan.buckets), default=0)
    sharded = plan_buckets(bases, bucket_bytes, True)
    assert sharded.slot_bytes == max((bucket.stride for bucket in sharded.buckets), default=0), "what a rank stages"
    assert plan.nbytes == sum(bucket.nbytes for bucket in plan.buckets) and len(plan.names) == len(described)
    assert plan == plan_buckets(tuple(bases), bucket_bytes), "planning is not deterministic"


SIMPLE = Base("w", "bfloat16", 2, (8,), (View("w", (8,), 0, 8),))


def test_digest_tells_layouts_apart() -> None:
    bases = [
        SIMPLE, *(dataclasses.replace(SIMPLE, views=(view,)) for view in (
            View("w", (2, 4), 0, 8), View("v", (8,), 0, 8), View("w", (8,), 0, 8, (1,)))),
        dataclasses.replace(SIMPLE, dtype="float16"), dataclasses.replace(SIMPLE, lengths=(4, 4)),
    ]  # fmt: skip
    plans = [plan_buckets((base,), 64, sharded) for base in bases for sharded in (False, True)]
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_bucket_too_small_for_the_ranks(world: int) -> None:
    base = Base("w", "bfloat16", 2, (1,) * world, (View("w", (world,), 0, world),))
    plan_buckets((base,), ALIGNMENT * world)
    with pytest.raises(ValueError, match=f"{ALIGNMENT * world - 1} bytes cannot serve {world} ranks") as caught:
        plan_buckets((base,), ALIGNMENT * world - 1)
    assert "raise actor_rollout_ref.rollout.update_weights_bucket_megabytes" in str(caught.value)


def test_duplicate_names_are_refused() -> None:
    parts = [base for name, owner in (("w", 0), ("v", 1), ("w", 0)) for base in parts_of(name, (owner,), 1, 64, 1, 4)]
    for bases in ([SIMPLE, dataclasses.replace(SIMPLE, lengths=(4, 4))], parts):
        with pytest.raises(ValueError, match="both named 'w'"):
            plan_buckets(tuple(bases), 1024)


def test_stages_fill_the_same_bucket() -> None:
    """Two pipeline stages of two tensor-parallel ranks: no rank's segment stays empty."""
    layers = [base for i in range(8) for base in parts_of(f"layer{i}", (0, 1) if i < 4 else (2, 3), 1, 64, 1, 4)]
    plan = plan_buckets(tuple(layers), 4 * 128)
    assert len(plan.buckets) == 2 and plan.nbytes == 8 * 2 * 64, "padding"
    for bucket in plan.buckets:
        assert {int(entry.name[-1]) < 4 for entry in bucket.entries} == {True, False}


@pytest.mark.parametrize(("shares", "said"), [
    ([Run(0, 0, 4), Run(0, 4, 2)], "hold 6 of 8 elements, 0 of them twice, of parameter 'w'"),
    ([Run(0, 0, 2, 2, 2, 4), Run(0, 0, 4)], "hold 6 of 8 elements, 2 of them twice, of parameter 'w'"),
])  # fmt: skip
def test_ranks_that_do_not_hold_each_element_once_are_refused(shares: list[Run], said: str) -> None:
    views = [View("w", (2, 4), 0, 8, None, (share,)) for share in shares]
    parts = [Part("w", (place,), (4,), "bfloat16", (view,)) for place, view in enumerate(views)]
    with pytest.raises(ValueError, match=said):
        match([RankLayout((part,), ((0, 1),)) for part in parts])
