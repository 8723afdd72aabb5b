"""torch's CUDA allocator as far as its large pool, streams and handing back go, without a device.

After ``get_free_block``, ``should_split``, ``try_merge_blocks`` and ``unmap_block`` of ``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verl_sync_plugin.sharding_manager.free_blocks import LARGE_PAGE, Segment

MIB = 1 << 20


@dataclass(eq=False)
class Piece:
    """A block; consecutive ones of a region are neighbours."""

    address: int
    size: int
    used: bool = False
    mapped: bool = True


@dataclass(eq=False)
class Region:
    """What one ``cudaMalloc`` gave, or one expandable segment with all its address space."""

    expandable: bool
    stream: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def merge(self) -> None:
        merged: list[Piece] = []
        for piece in self.pieces:
            before = merged[-1] if merged else None
            if before is not None and not before.used and not piece.used and before.mapped == piece.mapped:
                before.size += piece.size
            else:
                merged.append(piece)
        self.pieces = merged

    def cut(self, piece: Piece, size: int) -> None:
        """Leaves the rest of a piece as another."""
        place = self.pieces.index(piece)
        rest = Piece(piece.address + size, piece.size - size, piece.used, piece.mapped)
        self.pieces.insert(place + 1, rest)
        piece.size = size


class FakeAllocator:
    """Fulfils ``cache.Allocator``. Attributes are in bytes."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.regions: list[Region] = []
        self.device_free = free
        self.expandable = False
        self.most = 0
        self.empties = 0
        self.rounds_up = 0
        self._next_address = 1 << 40

    def plain(self, *sizes: int, used: tuple[int, ...] = (), stream: int = 0) -> None:
        """A segment with blocks of these sizes; those at ``used`` are in use."""
        self._add(False, sizes, used, 0, stream)

    def grown(self, *sizes: int, used: tuple[int, ...] = (), room: int = 1 << 40, stream: int = 0) -> None:
        """An expandable segment with blocks of these sizes, mapped up to whole pages, and ``room`` to grow into."""
        self._add(True, sizes, used, room, stream)

    def _add(self, expandable: bool, sizes: tuple[int, ...], used: tuple[int, ...], room: int, stream: int) -> None:
        region, address = Region(expandable, stream), self._next_address
        for place, size in enumerate(sizes):
            region.pieces.append(Piece(address, size, place in used))
            address += size
        total = address - self._next_address
        if expandable and total % LARGE_PAGE:
            region.pieces.append(Piece(address, -total % LARGE_PAGE))
            address += -total % LARGE_PAGE
        self.device_free -= address - self._next_address
        if room:
            region.pieces.append(Piece(address, room, mapped=False))
        region.merge()
        self.regions.append(region)
        self._next_address = address + room + (1 << 30)
        self.reset_peak()

    def segments(self) -> list[Segment]:
        found: list[Segment] = []
        for region in self.regions:
            run: Segment | None = None
            for piece in region.pieces:
                if not piece.mapped:
                    run = None
                    continue
                if run is None:
                    run = segment(piece.address, expandable=region.expandable, stream=region.stream)
                    found.append(run)
                run["blocks"].append({"size": piece.size, "state": "active_allocated" if piece.used else "inactive"})
        return found

    def _grows_to(self, region: Region, piece: Piece) -> int:
        after = region.pieces[region.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and not after[0].mapped else 0)

    def _find(self, size: int, stream: int) -> tuple[Region, Piece] | None:
        regions = [region for region in self.regions if region.stream == stream]
        free = [(region, piece) for region in regions for piece in region.pieces if not piece.used and piece.mapped]
        free = sorted((pair for pair in free if pair[1].size >= size), key=lambda pair: (pair[1].size, pair[1].address))
        if not self.expandable:
            return next((pair for pair in free if not pair[0].expandable), None)
        place = 0
        while place + 1 < len(free) and free[place][0].expandable:
            if self._grows_to(*free[place + 1]) >= self._grows_to(*free[place]):
                break
            place += 1
        return free[place] if free else None

    def allocate(self, nbytes: int, stream: int) -> int:
        assert nbytes > MIB, "the small pool"
        nbytes = -(-(nbytes + self.rounds_up) // 512) * 512
        found = self._find(nbytes, stream)
        if found is None:
            if self.device_free < nbytes:
                self.empty()
                raise torch.OutOfMemoryError("fake")
            self.plain(nbytes, stream=stream)
            found = self.regions[-1], self.regions[-1].pieces[0]
        region, piece = found
        if piece.size - nbytes >= 512 if self.expandable else piece.size - nbytes > MIB:
            region.cut(piece, nbytes)
        piece.used = True
        self.most = max(self.most, self.allocated())
        return piece.address

    def free(self, address: int) -> None:
        for region in self.regions:
            for piece in region.pieces:
                if piece.address == address and piece.used:
                    piece.used = False
                    region.merge()
                    return
        raise AssertionError("not allocated")

    def empty(self) -> None:
        self.empties += 1
        for region in list(self.regions):
            if not region.expandable and len(region.pieces) == 1 and not region.pieces[0].used:
                self.device_free += region.pieces[0].size
                self.regions.remove(region)
            elif region.expandable:
                self._unmap(region)

    def _unmap(self, region: Region) -> None:
        start = region.pieces[0].address
        for piece in [piece for piece in region.pieces if not piece.used and piece.mapped]:
            begin = start + -(-(piece.address - start) // LARGE_PAGE) * LARGE_PAGE
            end = start + (piece.address + piece.size - start) // LARGE_PAGE * LARGE_PAGE
            if begin >= end:
                continue
            if begin > piece.address:
                region.cut(piece, begin - piece.address)
                piece = region.pieces[region.pieces.index(piece) + 1]
            if end < piece.address + piece.size:
                region.cut(piece, end - begin)
            piece.mapped = False
            self.device_free += piece.size
        region.merge()

    def _mapped(self) -> list[Piece]:
        return [piece for region in self.regions for piece in region.pieces if piece.mapped]

    def reserved(self) -> int:
        return sum(piece.size for piece in self._mapped())

    def allocated(self) -> int:
        return sum(piece.size for piece in self._mapped() if piece.used)

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated()

    def set_expandable(self, enabled: bool) -> None:
        self.expandable = enabled


def segment(address: int, *, expandable: bool = False, stream: int = 0, kind: str = "large", pool: int = 0) -> Segment:
    """One without blocks yet."""
    return {
        "device": 0,
        "address": address,
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": (0, pool),
        "is_expandable": expandable,
        "blocks": [],
    }
