# SPDX-License-Identifier: Apache-2.0
"""Runs of bytes, the runs of a box, and what follows from load maps, against sets of single bytes and elements."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sync_plugin.layout import load_map as maps
from verl_sync_plugin.layout.load_map import Box, Constant, LoadMap, Move, NotCopied, StateTensor, Storage
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Partition, Run, compose, in_step
from verl_sync_plugin.layout.tensors import Base, Entry, View, numbers_of


def moves(run: Run) -> list[tuple[int, int]]:
    """Byte by byte, where it is read and where it goes."""
    starts = [(run.source + i * run.source_stride, run.target + i * run.target_stride) for i in range(run.count)]
    return [(source + byte, target + byte) for source, target in starts for byte in range(run.width)]


def expected(first: Run, second: Run) -> list[tuple[int, int]]:
    """Byte by byte, what goes through both."""
    origin = {target: source for source, target in moves(first)}
    return sorted((origin[byte], to) for byte, to in moves(second) if byte in origin)


@st.composite
def runs(draw: st.DrawFn, strides: st.SearchStrategy[int] | None = None) -> Run:
    """``strides``: of the side that meets the other run; what is drawn is turned as needed."""
    width = draw(st.integers(1, 8))
    count = draw(st.integers(1, 6))
    gap, other = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    stride = width + gap if strides is None else max(width, draw(strides))
    far = (stride, width + other) if count > 1 else (0, 0)
    return Run(draw(st.integers(0, 30)), 1000 + draw(st.integers(0, 30)), width, count, *far)


def turned(run: Run) -> Run:
    """Backwards: its target is where it was read."""
    return Run(run.target, run.source, run.width, run.count, run.target_stride, run.source_stride)


SAME = st.shared(st.integers(4, 14), key="stride")


@settings(max_examples=500, deadline=None)
@given(runs().map(turned) | runs(SAME).map(turned), runs() | runs(SAME))
def test_exactly_what_goes_through_both(first: Run, second: Run) -> None:
    found = compose(first, second)
    assert sorted(move for run in found for move in moves(run)) == expected(first, second)
    assert all(run.count > 1 or (run.source_stride, run.target_stride) == (0, 0) for run in found)
    if in_step(first, second):
        assert len(found) <= 3, "one run for each row"
    if first.count == second.count == 1:
        assert len(found) <= 1


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=12), runs())
def test_a_run_meets_every_part_that_it_reads(drawn: list[tuple[int, int]], run: Run) -> None:
    parts, at = [], 0
    for number, (gap, width) in enumerate(drawn):
        at += gap
        parts.append(Run(5000 * number, at, width))
        at += width
    met = list(Partition(parts).meet(run))
    for number, part in enumerate(parts):
        of_part = sorted(move for index, common in met if index == number for move in moves(common))
        assert of_part == expected(part, run)
    assert [index for index, _ in met] == sorted(index for index, _ in met)


def test_columns_in_step_are_one_run() -> None:
    """Half the columns of 4096 rows out of a bucket, and a quarter of them into the model."""
    piece, columns = Run(64, 0, 64, 4096, 64, 128), Run(32, 7000, 32, 4096, 128, 32)
    assert compose(piece, columns) == [Run(96, 7000, 32, 4096, 64, 32)]
    assert compose(piece, Run(0, 0, 4096 * 128)) == [Run(64, 0, 64, 4096, 64, 128)]
    assert not in_step(piece, Run(0, 0, 32, 8192, 64, 32)) and in_step(piece, columns)
    assert list(Run(8, 0, 4, 3, 4, 9).sources()) == [(8, 20)], "rows without gaps are one interval"
    assert list(Run(8, 0, 4, 2, 6, 9).sources()) == [(8, 12), (14, 18)]


def test_repetitions_that_overlap_are_nobodys() -> None:
    for stride in (-8, 0, 3):
        for pair in itertools.permutations((Run(0, 0, 64), Run(0, 0, 4, 3, stride, stride))):
            with pytest.raises(AssertionError, match="overlap"):
                compose(*pair)


BF16, FP32 = "bfloat16", "float32"


def view_of(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Some slices and permutations of a tensor."""
    for _ in range(rng.randrange(4)):
        dim = rng.randrange(tensor.dim())
        match rng.randrange(3):
            case 0:
                start = rng.randrange(tensor.shape[dim])
                tensor = tensor.narrow(dim, start, rng.randint(1, tensor.shape[dim] - start))
            case 1:
                tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
            case 2:
                tensor = tensor[(*[slice(None)] * dim, slice(None, None, 2))]
    return tensor


def elements_of(box: Box) -> list[tuple[int, int]]:
    at = itertools.product(*(range(size) for size, _, _ in box.dims))
    steps = [d[1:] for d in box.dims]
    return [
        (box.source + sum(i * s for i, (s, _) in zip(each, steps, strict=True)),
         box.target + sum(i * t for i, (_, t) in zip(each, steps, strict=True)))
        for each in at
    ]  # fmt: skip


def covered(spans: np.ndarray) -> set[int]:
    return {number for first, end in spans.tolist() for number in range(first, end)}


@pytest.mark.parametrize("seed", range(10))
def test_a_box_is_what_a_copy_moves(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        source = view_of(torch.arange(math.prod(shape)).reshape(shape), rng)
        target = torch.arange(1000)[3:][: source.numel()].reshape(source.shape[::-1])
        target = target.permute(*reversed(range(source.dim())))
        first = int(source.storage_offset()), int(target.storage_offset())
        box = maps.box_of(source.shape, source.stride(), target.stride(), *first)
        expected = dict(zip(source.flatten().tolist(), target.flatten().tolist(), strict=True))
        assert dict(elements_of(box)) == expected and box.numel == len(expected)
        runs = box.runs(2)
        bytes_of = {2 * s + b: 2 * t + b for s, t in expected.items() for b in range(2)}
        assert dict(move for run in runs for move in moves(run)) == bytes_of
        assert len(runs) == box.run_count
        assert covered(maps.spans_of([maps.box_spans(box, True)])) == set(expected)
        assert covered(maps.spans_of([maps.box_spans(box, False, 2)])) == set(bytes_of.values())
        packed = elements_of(box.packed())
        assert sorted(t for _, t in packed) == list(range(box.numel)) and {s for s, _ in packed} == set(expected)


WHOLE, UPPER = Box(0, 0, ((8, 1, 1),)), Box(0, 0, ((4, 1, 1),))


def moved(*moves: tuple[int, Box], dtype: str = FP32, **more: object) -> LoadMap:
    return LoadMap(moves=tuple(Move(n, n, dtype, box) for n, box in moves), **more)  # type: ignore[arg-type]


def test_what_is_skipped_or_no_element_is_not_left_out() -> None:
    """Tensors that are: ``contract/test_engine_models.py``."""
    flat = Entry("a", FP32, (8,), None, 32, ())
    some = moved((0, WHOLE), skipped=((1, "nobody needs it"),))
    assert maps.unused(dict.fromkeys("abc", flat), {0: 0, 1: 1, 2: 2}, [some]) == [(2, 32, 32)]
    columns = Entry("a", BF16, (4, 3), (8, 1), 54, ())  # rows with gaps
    assert maps.unused({"a": columns}, {0: 0}, [moved((0, maps.full_box((4, 3), (8, 1))), dtype=BF16)]) == []
    assert maps.unused({"a": columns}, {0: 0}, [moved((0, Box(0, 0, ((2, 8, 3), (3, 1, 1)))))]) == [(0, 12, 24)]


def test_what_a_sync_leaves_unwritten() -> None:
    stores = (
        Storage("x", (StateTensor("x", FP32, WHOLE, False), StateTensor("y", FP32, Box(8, 8, ((2, 1, 1),)), True))),
        Storage("z", (StateTensor("z", BF16, WHOLE, False),)),
    )
    found = LoadMap(storages=stores, moves=(Move(0, 0, FP32, UPPER),), constants=(Constant(0, ((16, 24),), bytes(4)),))
    wrote = [(kept.name, wrote, of) for kept, wrote, of in maps.unwritten(found)]
    assert wrote == [("x", 6, 8), ("y", 0, 2), ("z", 0, 8)]
    assert sum(len(storage.tensors) for storage in found.storages) == 3
    theirs = LoadMap(storages=stores, moves=found.moves, own_writes=((0, ((16, 40),)), (1, ((0, 15),))))
    assert [(kept.name, wrote) for kept, wrote, _ in maps.unwritten(theirs)] == [("z", 7)], "half an element is none"


def test_which_dtypes_travel() -> None:
    one = LoadMap(moves=(Move(0, 0, BF16, WHOLE), Move(1, 1, BF16, WHOLE)), not_copied=(NotCopied(2, "", "", ()),))
    other = LoadMap(moves=(Move(0, 0, FP32, WHOLE), Move(0, 1, BF16, WHOLE)), not_copied=(NotCopied(2, "", BF16, ()),))
    assert maps.wire_dtypes("abc", [one]) == {"a": BF16, "b": BF16, "c": ""}
    assert maps.wire_dtypes("abc", [other]) == {"a": FP32, "c": BF16}
    for both in ([one, other], [other, one]):
        assert maps.wire_dtypes("abc", both) == {"a": FP32, "b": BF16, "c": ""}


def test_whose_bytes_are_counted() -> None:
    views = tuple(View(name, (8,), 0, 8) for name in ("head", "embed"))
    odd = (View("odd", (4,), 0, 4), View("strange", (6,), 2, 6))
    bases = [Base("tied", FP32, 4, (8,), views), Base("z", FP32, 4, (8,), (View("z", (8,), 0, 8),))]
    buckets, wrong = (
        [bucket.entries for bucket in plan_buckets((*bases, *more), 1 << 10).buckets]
        for more in ((), (Base("odd", FP32, 4, (8,), odd),))
    )
    with pytest.raises(ValueError, match="odd, strange: tensors that share bytes have to share all of them"):
        maps.owners_of(wrong)
    assert list(numbers_of(buckets)) == ["embed", "head", "z"]
    owners = maps.owners_of(buckets)
    assert owners == {0: 1, 1: 1, 2: 2}
    copied = moved((0, WHOLE), (1, UPPER), not_copied=(NotCopied(2, "", "", ()),))
    assert maps.read_parts(copied, owners) == [(1, WHOLE), (1, UPPER), (2, None)]


ALL = Box(0, 0, ((96, 1, 1),))
HALVES = [Box(0, 0, ((48, 1, 1),)), Box(48, 0, ((48, 1, 1),))]
COLUMNS = [Box(first, 0, ((12, 8, 4), (4, 1, 1))) for first in (0, 4)]
# Queries are shared out, keys and values held by both ranks
FUSED = [Box(first, 0, ((many, 1, 1),)) for first, many in ((0, 32), (32, 32), (64, 16), (80, 16))]
HELD = [[ALL], [None], HALVES, HALVES[:1], COLUMNS, [FUSED[0], *FUSED[2:]], FUSED[1:]]


def test_parts_are_weighed_so_that_every_element_counts_alike() -> None:
    """Or only whole ones, or none, where some are nobody's, or a part has some that there are unequally often."""
    chance, found = random.Random(3), set[int]()
    for _ in range(500):
        ranks = [[(0, box) for box in chance.choice(HELD)] for _ in range(chance.randint(1, 5))]
        parts = [range(96) if box is None else [s for s, _ in elements_of(box)] for rank in ranks for _, box in rank]
        many = Counter(element for part in parts for element in part)
        alike = len(many) == 96 and all(len({many[element] for element in part}) == 1 for part in parts)
        wholes = [int(box is None) for rank in ranks for _, box in rank]
        times = math.lcm(*many.values()) if alike else sum(wholes) or -1
        (weighed, once), factors = maps.hash_factors([96, 7], [*ranks, [(1, None)]])
        assert (weighed, once, factors.pop()) == (times, 1, [1]), ranks
        wanted = [times // many[part[0]] if alike else whole for part, whole in zip(parts, wholes, strict=True)]
        assert [each for of_rank in factors for each in of_rank] == wanted, ranks
        found.add(times)
    assert {-1, 1, 2, 3, 6} <= found
