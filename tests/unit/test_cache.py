"""Handing back a part of the cache: the choice, the protocol with the allocator, a real one where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.fake_allocator import MIB, FakeAllocator, segment
from verl_sync_plugin.sharding_manager.cache import CudaAllocator, release, release_cache
from verl_sync_plugin.sharding_manager.free_blocks import LARGE_PAGE, FreeBlock, choose, free_blocks

GIB = 1 << 30
PLAIN_SIZES = st.sampled_from([2, 6, 20, 20, 22, 64, 64, 128, 500, 1024]).map(lambda size: size * MIB)
GROWN_SIZES = st.integers(1, 3 * 1024 * 1024).map(lambda size: size * 512)
STREAMS = st.sampled_from([0, 0, 7])
MISSING = st.integers(1, 12 * 1024).map(lambda size: size * MIB)


def chosen(sizes: list[int], missing: int) -> list[int]:
    """What goes of free segments of these sizes, in MiB."""
    blocks = [FreeBlock(GIB * place, size * MIB, size * MIB) for place, size in enumerate(sizes)]
    held = [hold.size // MIB for hold in choose(blocks, missing * MIB)]
    for size in held:
        sizes.remove(size)
    return sorted(sizes)


@pytest.mark.parametrize(
    ("sizes", "missing", "goes"),
    [
        pytest.param([20, 100, 2048], 2000, [2048], id="one that is large enough"),
        pytest.param([20, 100, 2048], 100, [100], id="exactly"),
        pytest.param([20, 100, 2048], 90, [100], id="the smallest that is enough"),
        pytest.param([2048] * 6, 7000, [2048] * 4, id="few large ones"),
        pytest.param([*[2048] * 6, *[2] * 500], 7000, [2048] * 4, id="a little more rather than many small ones"),
        pytest.param([4096, 600, 500, 20], 1000, [500, 600], id="not far beyond"),
        pytest.param([2048, 60], 100, [2048], id="none that was not needed"),
        pytest.param([20, 20], 41, [20, 20], id="not enough"),
        pytest.param([20, 20], 40, [20, 20], id="just enough"),
        pytest.param([20, 20], 0, [], id="nothing missing"),
        pytest.param([], 10, [], id="nothing there"),
    ],
)
def test_choice_among_segments(sizes: list[int], missing: int, goes: list[int]) -> None:
    assert chosen(list(sizes), missing) == goes


@given(st.lists(PLAIN_SIZES, max_size=60), MISSING)
def test_choice_is_enough_and_little_more(sizes: list[int], missing: int) -> None:
    blocks = [FreeBlock(2 * GIB * place, size, size) for place, size in enumerate(sizes)]
    goes = sum(sizes) - sum(hold.size for hold in choose(blocks, missing))
    assert goes >= min(missing, sum(sizes))
    assert goes < 2 * missing or goes == min(size for size in sizes if size >= missing)


def test_of_an_expandable_segment_whole_pages_go() -> None:
    run = segment(LARGE_PAGE, expandable=True)
    sizes = [LARGE_PAGE, 30 * MIB, 10 * MIB, 39 * MIB, MIB]
    states = ["active_allocated", "inactive", "active_allocated", "inactive", "active_awaiting_free"]
    run["blocks"] = [{"size": size, "state": state} for size, state in zip(sizes, states, strict=True)]
    first, second = free_blocks([run])
    assert (first.address, first.size, first.returns, first.pages_end) == (2 * LARGE_PAGE, 30 * MIB, 20 * MIB, 60 * MIB)
    assert (second.address, second.size, second.returns) == (80 * MIB, 39 * MIB, 20 * MIB)
    assert not first.last and not second.last


def test_what_cannot_be_kept_counts_as_gone() -> None:
    others = [segment(0, stream=5), segment(GIB, kind="small"), segment(2 * GIB, pool=1), segment(3 * GIB)]
    for other in others:
        other["blocks"] = [{"size": 100 * MIB, "state": "inactive"}]
    blocks = free_blocks(others)
    assert [(block.returns // MIB, block.keepable) for block in blocks] == [(100, True), (100, False), (100, True)]
    assert [(hold.size, hold.stream) for hold in choose(blocks, 200 * MIB)] == [(100 * MIB, 0)]
    assert not choose(blocks, 201 * MIB)


def returnable(allocator: FakeAllocator) -> int:
    return sum(block.returns for block in free_blocks(allocator.segments()))


def check_release(allocator: FakeAllocator, missing: int) -> tuple[int, int]:
    """What went, and what could have gone; nothing else may have changed."""
    before, used, could = allocator.reserved(), allocator.allocated(), returnable(allocator)
    peak, free = allocator.peak(), allocator.device_free
    went = release(allocator, missing)
    assert allocator.allocated() == used and allocator.peak() == max(peak, used)
    assert not allocator.expandable and allocator.empties <= 2
    assert went == before - allocator.reserved() == allocator.device_free - free
    assert min(missing, could) <= went <= could
    return went, could


def test_segments_are_kept() -> None:
    allocator = FakeAllocator()
    allocator.plain(*[64 * MIB] * 3, used=(1,))  # its free blocks are as large as segments that go and stay
    for size in (2048, 64, 64, 20, 2048, 1024):
        allocator.plain(size * MIB)
    went, _ = check_release(allocator, 1064 * MIB)
    assert went == 1088 * MIB and allocator.empties == 1


def test_what_other_streams_have_cached_stays_as_well() -> None:
    """As FSDP2's training leaves it: most of it belongs to the stream on which it gathers."""
    allocator = FakeAllocator()
    allocator.grown(3 * GIB, 5 * GIB, used=(0,))
    allocator.grown(14 * GIB, stream=7)
    allocator.plain(2 * GIB, stream=9)
    went, _ = check_release(allocator, 6 * GIB)
    assert 6 * GIB <= went <= 6 * GIB + LARGE_PAGE and allocator.empties == 1


@pytest.mark.parametrize("missing", [1, 20, 21, 7000, 33990])
def test_one_large_block_goes_in_part(missing: int) -> None:
    """As verl's training leaves it: one expandable segment, nearly all of it free."""
    allocator = FakeAllocator()
    allocator.grown(3 * GIB, 40 * MIB, 512, 34 * GIB + 512 * 7, used=(0, 2))
    went, _ = check_release(allocator, missing * MIB)
    assert missing * MIB <= went < missing * MIB + LARGE_PAGE and allocator.empties == 1


def test_more_than_there_is() -> None:
    allocator = FakeAllocator()
    allocator.plain(64 * MIB)
    allocator.grown(GIB)
    assert check_release(allocator, 2 * GIB) == (64 * MIB + -(-GIB // LARGE_PAGE) * LARGE_PAGE,) * 2
    assert release(allocator, None) == 0


@st.composite
def allocators(draw: st.DrawFn) -> FakeAllocator:
    allocator = FakeAllocator()
    for kind in draw(st.lists(st.sampled_from(["plain", "grown"]), max_size=12)):
        sizes = draw(st.lists(PLAIN_SIZES if kind == "plain" else GROWN_SIZES, min_size=1, max_size=8))
        used = draw(st.frozensets(st.integers(0, len(sizes) - 1)))
        if kind == "plain":
            allocator.plain(*sizes, used=tuple(used), stream=draw(STREAMS))
        elif draw(st.booleans()):
            allocator.grown(*sizes, used=tuple(used), stream=draw(STREAMS))
        else:  # up to a hole
            room = draw(st.integers(1, 60)) * LARGE_PAGE
            allocator.grown(*sizes, used=tuple(used), room=room, stream=draw(STREAMS))
    return allocator


@settings(deadline=None)
@given(allocators(), MISSING)
def test_any_state_of_the_allocator(allocator: FakeAllocator, missing: int) -> None:
    check_release(allocator, missing)


@settings(deadline=None)
@given(st.lists(GROWN_SIZES, min_size=1, max_size=30), st.integers(0, 1 << 30), MISSING)
def test_of_one_expandable_segment_few_pages_more_go(sizes: list[int], used: int, missing: int) -> None:
    allocator = FakeAllocator()
    allocator.grown(*sizes, used=tuple(place for place in range(len(sizes)) if used >> place & 1))
    allocator.plain(*[64 * MIB] * 3, used=(1,))
    allocator.plain(64 * MIB)
    went, _ = check_release(allocator, missing)
    assert went < missing + 4 * LARGE_PAGE and allocator.empties <= 1


def rounds_up(allocator: FakeAllocator) -> None:
    allocator.rounds_up = 4 * MIB


def changes_after_the_snapshot(allocator: FakeAllocator) -> None:
    before = allocator.segments()
    allocator.plain(1023 * MIB)
    allocator.plain(1025 * MIB)
    allocator.regions.pop(0)
    allocator.segments = lambda: before  # type: ignore[method-assign]


def is_full(allocator: FakeAllocator) -> None:
    rounds_up(allocator)
    allocator.device_free = 0


@pytest.mark.parametrize("surprise", [rounds_up, changes_after_the_snapshot, is_full])
def test_after_a_surprise_everything_goes(surprise: Callable[[FakeAllocator], Any]) -> None:
    allocator = FakeAllocator()
    for size in (1024, 512, 256):
        allocator.plain(size * MIB)
    surprise(allocator)
    release(allocator, 256 * MIB)
    assert allocator.reserved() == allocator.allocated() == allocator.peak() == 0


def test_a_cpu_has_no_cache() -> None:
    assert release_cache(torch.device("cpu"), None) == release_cache(torch.device("cpu"), GIB) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_real_allocator(expandable: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    allocator = CudaAllocator(device)
    allocator.set_expandable(expandable)
    tensors = [torch.empty(size * MIB, dtype=torch.uint8, device=device) for size in (2, 30, 64, 300, 64, 700)]
    kept = torch.full((40 * MIB,), 7, dtype=torch.uint8, device=device)
    allocator.set_expandable(False)
    del tensors
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, reserved, peak = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    missing = 310 * MIB
    went = release_cache(device, missing)
    assert missing <= went < 600 * MIB
    small = 2 * MIB  # a segment of the small pool went with the rest and may be back
    assert reserved - went <= torch.cuda.memory_reserved() <= reserved - went + small
    assert reserved - went >= kept.nbytes + 500 * MIB
    assert went - small <= torch.cuda.mem_get_info()[0] - free < 600 * MIB
    assert torch.cuda.max_memory_allocated() == peak, "what was held is no peak"
    assert bool((kept == 7).all())
    assert release_cache(device, None) > 500 * MIB
