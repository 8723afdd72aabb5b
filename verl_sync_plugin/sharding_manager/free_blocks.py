"""Which of its free blocks torch's CUDA allocator keeps when only so many bytes of its cache have to go.

Emptying the cache hands back all that is free: a segment from ``cudaMalloc`` when all of it is, and of an expandable
segment every page without a byte in use. What has been allocated for that moment stays (``cache.py``). So keeping a
block means being given exactly that block, and the allocator gives out the smallest free one that is large enough, at
the lowest address among equals, among those of the stream that asks; all here depends on that rule. To it, the last
block of an expandable segment is as large as it may yet grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

# Smaller requests are served from the small pool
SMALLEST_LARGE = (1 << 20) + 1
# Pages of expandable segments, as torch maps them
LARGE_PAGE, SMALL_PAGE = 20 << 20, 2 << 20


class Block(TypedDict):
    """A block in a snapshot of the allocator."""

    size: int
    state: str


class Segment(TypedDict):
    """The fields of ``torch.cuda.memory_snapshot()`` that count here. An expandable one is a run of mapped pages."""

    device: int
    address: int
    stream: int
    segment_type: str
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    blocks: list[Block]


@dataclass(frozen=True)
class FreeBlock:
    """A free block.

    Attributes:
        address: where it begins.
        size: bytes.
        returns: bytes that emptying the cache hands back.
        keepable: of the large pool; what is not goes with any emptying.
        pages_end: where the last whole page inside ends, in an expandable segment; ``None`` elsewhere.
        last: of its expandable segment.
        stream: whose allocations it serves.
    """

    address: int
    size: int
    returns: int
    keepable: bool = True
    pages_end: int | None = None
    last: bool = False
    stream: int = 0

    def front(self, missing: int) -> int:
        """Bytes to keep at the front so that ``missing`` bytes go, in whole pages; 0 when it goes as a whole."""
        if self.pages_end is None:
            return 0
        kept = self.pages_end - -(-missing // LARGE_PAGE) * LARGE_PAGE - self.address
        return kept if kept >= 2 * LARGE_PAGE else 0  # any free block without a whole page is smaller than that


@dataclass(frozen=True)
class Hold:
    """A request for a stream that the allocator has to serve from ``address``, or the plan has failed."""

    size: int
    address: int
    stream: int = 0


def free_blocks(segments: Iterable[Segment]) -> list[FreeBlock]:
    """The free blocks of one device's segments, without private pools, which emptying the cache may leave alone."""
    found = []
    for segment in segments:
        if tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        large = segment["segment_type"] == "large"
        stream = segment["stream"]
        start = address = segment["address"]
        page = LARGE_PAGE if large else SMALL_PAGE
        for place, block in enumerate(segment["blocks"], start=1):
            size, last = block["size"], place == len(segment["blocks"])
            if block["state"] == "inactive" and segment["is_expandable"]:
                end = start + (address + size - start) // page * page
                returns = max(0, end - start - -(-(address - start) // page) * page)
                found.append(FreeBlock(address, size, returns, large, end, last, stream))
            elif block["state"] == "inactive":
                returns = size if len(segment["blocks"]) == 1 else 0
                found.append(FreeBlock(address, size, returns, large, stream=stream))
            address += size
    return found


def choose(blocks: Sequence[FreeBlock], missing: int) -> list[Hold]:
    """What to hold while the cache is emptied, in this order, so that ``missing`` bytes go and little more.

    Args:
        blocks: all free ones.
        missing: bytes.

    Returns:
        The requests; none when everything has to go.
    """
    missing -= sum(block.returns for block in blocks if not block.keepable)
    streams: dict[int, list[FreeBlock]] = {}
    for block in blocks:
        if block.keepable:
            streams.setdefault(block.stream, []).append(block)
    holds = list[Hold]()
    # FSDP gathers on a stream of its own, which may own most of the cache: the fewer streams give, the better
    for group in sorted(streams.values(), key=_returns, reverse=True):
        if missing < _returns(group):
            kept = _choose(group, missing)
            missing = 0
            holds += kept
        else:
            missing -= _returns(group)
    return holds


def _returns(blocks: Iterable[FreeBlock]) -> int:
    return sum(block.returns for block in blocks)


def _choose(blocks: Sequence[FreeBlock], missing: int) -> list[Hold]:
    """``choose`` among the blocks of one stream."""
    left = [block for block in blocks if block.returns]
    slack, given = missing // 4, list[FreeBlock]()
    while left and missing > 0:
        giving = _next(left, missing, slack)
        # Of equal ones the highest, whatever it returns: the allocator gives out the lower ones first
        equal = [block for block in left if block.size == giving.size]
        giving = max(equal, key=lambda block: (block.last, block.address))
        left.remove(giving)
        given.append(giving)
        missing -= giving.returns
    front = _take_back(given, left, -missing)
    if not left and front is None:
        return []
    holds = [Hold(block.size, block.address, block.stream) for block in [*left, *_in_the_way(blocks, given)]]
    holds.sort(key=lambda hold: (-hold.size, hold.address))
    return holds if front is None else [*holds, front]


def _take_back(given: list[FreeBlock], left: list[FreeBlock], surplus: int) -> Hold | None:
    """Moves up to ``surplus`` bytes from ``given`` to ``left``. The result is the front that one given block keeps."""
    # In the order in which the allocator would give them out: a front must be the first that is large enough for it
    for block in sorted(given, key=lambda block: (block.last, 0 if block.last else block.size, block.address)):
        if block.returns > surplus:
            front = block.front(block.returns - surplus)
            return Hold(front, block.address, block.stream) if front else None
        surplus -= block.returns
        given.remove(block)
        left.append(block)
    return None


def _in_the_way(blocks: Iterable[FreeBlock], given: Iterable[FreeBlock]) -> Iterator[FreeBlock]:
    """Blocks that would stay anyway, but that the allocator might give out in place of one that has to be held."""
    lowest: dict[int, int] = {}
    for block in given:
        lowest[block.size] = min(block.address, lowest.get(block.size, block.address))
    for block in blocks:
        stays = not block.returns and not block.last and block.size >= SMALLEST_LARGE
        # Beyond an equal one that is to go, a request would be served from that
        if stays and block.address < lowest.get(block.size, block.address + 1):
            yield block


def _next(left: Sequence[FreeBlock], missing: int, slack: int) -> FreeBlock:
    """The block to give: few large ones, up to ``slack`` bytes more than are missing, or one that may go in part."""
    # What is last in an expandable segment is given out last: were it kept, another might be held in its place
    last = [block for block in left if block.last]
    if last:
        return max(last, key=lambda block: block.address)
    enough = [block for block in left if block.returns >= missing]
    less = [block for block in left if block.returns < missing]
    if enough:
        best = min(enough, key=lambda block: (_beyond(block, missing), -block.address))
        if sum(block.returns for block in less) < missing or _beyond(best, missing) <= slack:
            return best
    return max(less, key=lambda block: (block.returns, block.address))


def _beyond(block: FreeBlock, missing: int) -> int:
    return 0 if block.front(missing) else block.returns - missing
