# SPDX-License-Identifier: Apache-2.0
"""Loads what arrives into the engine's model, as its ``LoadMap`` says, and reports what was read and what is held.

What the map copies goes from regions of memory (a slot, or the trainer's own parameters) straight to its place, hashed
on the way. A tensor that is cast or turned over is brought into scratch memory whole and copied from there. Where the
model loads everything itself, all tensors are brought together in the same way, and given to its ``load_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from verl_sync_plugin.copies.copier import BucketMemory, Copier, Memory, Prepared
from verl_sync_plugin.copies.plain import Block, copy_runs
from verl_sync_plugin.copies.table import QuantizeTable, Rectangle
from verl_sync_plugin.engine.introduce import (
    FP8,
    Places,
    Storages,
    bits_of,
    flagged,
    introduce,
    kept_in_fp8,
    needs_reorder,
    source_view,
    target_view,
    views_of,
)
from verl_sync_plugin.engine.model import EngineModel, FusedPairs, partner_of
from verl_sync_plugin.layout.load_map import LoadMap, Move, Tensors, held_parts, read_parts, size_of
from verl_sync_plugin.layout.strided import Partition, Run, compose, in_rows
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Bucket, Entry, dtype_name, extents_of, place_of
from verl_sync_plugin.log import say, some
from verl_sync_plugin.transport.memory import Location, Regions
from verl_sync_plugin.transport.protocol import Held, Manifest

Layout = tuple[tuple[object, ...], ...]
InPlaceTables = tuple[tuple[str, ...], Memory, tuple[Prepared, Prepared], list[QuantizeTable]]


class LayoutKey:
    """The places of a model's parameters and buffers, and what the engine adds to that. ``param.data = tensor`` makes
    no operation, so this is compared at every sync; the walk over modules is done again only where one was replaced."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._modules, self._children = list[torch.nn.Module](), list[object]()

    def now(self) -> Layout:
        """The layout at this moment; equal to another as long as nothing has moved."""
        if not self._modules or self._children != [child for each in self._modules for child in each._modules.values()]:
            self._modules = list(self._model.module.modules())
            self._children = [child for each in self._modules for child in each._modules.values()]
            self._owned = [owned for each in self._modules for owned in (each._parameters, each._buffers)]
        tensors = (tensor for owned in self._owned for tensor in owned.values() if tensor is not None)
        return (self._model.layout_token(), *map(place_of, tensors))


class _Work(NamedTuple):
    """The work of one bucket: copies that hash what they copy, what is hashed without a copy, and whole tensors."""

    copies: list[Block]
    reads: list[Block]
    whole: tuple[Entry, ...]


class ModelLoad:
    """Belongs to one model and one manifest. Device memory: the tables (see ``KernelTable``).

    Args:
        model: of this engine rank.
        manifest: what the buckets hold.
        device: where the model is.
        before: the load of the manifest before; what it knows of the same tensors holds in other buckets, too.

    Attributes:
        map: what the model does with the tensors; found out by ``begin``.
        is_new: no sync has ended with it yet.
        replayed: how many tensors a sync copies without the model's own load.
    """

    def __init__(
        self, model: EngineModel, manifest: Manifest, device: torch.device, before: ModelLoad | None = None
    ) -> None:
        if before is not None:
            before._put_back()
        self._model, self.manifest, self.device = model, manifest, device
        self._tensors = Tensors([bucket.entries for bucket in manifest.buckets])
        self._names, self._entries = self._tensors.names, self._tensors.entries
        model.sent = frozenset(self._names)
        self.map, self._storages, self._key = LoadMap(), Storages(model.module), LayoutKey(model)
        self._places: Places | None = None  # while a load may put something elsewhere
        self._layout: Layout | None = None
        self._now: Layout | None = None
        self.replayed, self.is_new = 0, False
        if before is not None and before._shapes() == self._shapes():
            self.is_new = before.is_new
            self.map, self._storages = before.map, before._storages
            self._key, self._layout = before._key, before._layout
        self._compiled = False
        self._in_place_tables: InPlaceTables | None = None

    def _shapes(self) -> list[tuple[object, ...]]:
        return [(name, self._entries[name].shape, self._entries[name].strides) for name in self._names]

    def note_layout(self) -> None:
        """While there is time: looks where the model's parameters are, for ``begin``."""
        self._put_back()
        self._now = self._key.now()

    def begin(self) -> None:
        """Call it before a sync is loaded. Makes the load map where there is none or parameters have moved; parameters
        then hold marks, so the sync has to be loaded. Writes constants."""
        self._put_back()
        now, self._now = self._now or self._key.now(), None
        if now != self._layout:
            self._introduce()
        if self.map.why_own_load or self.map.derives:
            self._places = Places(self._model.module)
        if not self._compiled:
            self._compile()
        self._read_sums.zero_()
        if self._zeros:  # memory that was released comes back with anything in it
            torch._foreach_zero_(self._zeros)  # a padded model has thousands
        for view, bits in self._bits:
            view.copy_(bits)
        self._assembler = Assembler(frozenset(self._names), self._model.fused_pairs if self.map.why_own_load else ())

    def _put_back(self) -> None:
        """Puts back what a load has put elsewhere, also one that failed."""
        if self._places is not None:
            self._places.restore()
        self._places = None

    def _introduce(self) -> None:
        if in_fp8 := kept_in_fp8(self._model, list(self._entries.values())):
            rows, columns = self._model.fp8_block
            self.map = LoadMap(fp8=tuple((self._tensors.numbers[name], rows, columns) for name in in_fp8))
        else:
            self.map, self._storages = introduce(self._model, self._tensors, self.device)
        self._key = LayoutKey(self._model)
        self._layout, self._compiled, self.is_new = self._key.now(), False, True

    # --------------------------------------------------------------------------------------------------- the tables
    def _compile(self) -> None:
        self._in_place_tables = None
        self._copier = Copier(self.device, self._storages.flats)
        parts = read_parts(self.map, self._tensors.owners)
        self._hashed = [self._names[number] for number, _ in parts]  # the tensor of each sum
        self._whole = {number: part for part, (number, box) in enumerate(parts) if box is None}
        self._moves: dict[str, list[tuple[int, Move]]] = {}  # of the tensors that are copied, with their parts
        self._by_scratch: set[str] = set()
        for part, move in enumerate(self.map.copied):
            name = self._names[move.tensor]
            self._moves.setdefault(name, []).append((part, move))
            if move.dtype != self._entries[name].dtype or needs_reorder(move):
                self._by_scratch.add(name)
        self._works = [self._cut(bucket) for bucket in self.manifest.buckets]
        self._ready = [(self._copier.prepare(w.copies), self._copier.prepare(w.reads)) for w in self._works]
        self._read_sums = torch.zeros(len(parts), dtype=torch.int64, device=self.device)
        self.replayed = 0 if self.map.why_own_load else len(self._names)
        flats = self._storages.flats
        views = [(each, view) for each in self.map.constants for view in views_of(each, flats[each.storage])]
        self._zeros = [view for each, view in views if not any(each.bits)]
        self._bits = [(view, bits_of(each, view)) for each, view in views if any(each.bits)]
        self._constants = [(self.map.storages[each.storage].name, each, view) for each, view in views]
        self._pieces: dict[str, list[Run]] = {}  # of each tensor, from all buckets
        for bucket in self.manifest.buckets:
            for entry in bucket.entries:
                found = (replace(piece, source=bucket.first + piece.source) for piece in entry.pieces)
                self._pieces.setdefault(entry.name, []).extend(found)
        held = held_parts(self.map, self._tensors.dtypes)
        of_held = [(move, self._tensors.dtypes[move.tensor], self._pieces[self._names[move.tensor]]) for move in held]
        self._held = HeldHashes(of_held, self._copier)
        how = "the kernel" if self._copier.kernel else "plain copies"
        how = f"the model's own load ({self.map.why_own_load})" if self.map.why_own_load else how
        say(f"{len(self._names)} tensors go by {how}")
        self._compiled = True

    def _cut(self, bucket: Bucket) -> _Work:
        copies, reads, whole = list[Block](), list[Block](), list[Entry]()
        for entry in bucket.entries:
            if self.map.why_own_load or entry.name in self._by_scratch:
                whole.append(entry)
                reads += self._blocks(entry, bucket, packed=True)
            else:
                copies += self._blocks(entry, bucket)
        for extent in extents_of(bucket.entries) if self._whole else ():
            first, part = extent.first, self._whole.get(self._tensors.numbers[extent.names[0]])
            if part is not None:
                region, position = first // bucket.stride, bucket.first + first
                reads.append(Block(first, 0, position, extent.end - first, region=region, group=part))
        return _Work(copies, reads, tuple(whole))

    def _blocks(self, entry: Entry, bucket: Bucket, packed: bool = False) -> Iterator[Block]:
        """Composes a bucket's pieces of a tensor with its moves; ``packed`` is only read."""
        for part, move in self._moves.get(entry.name, ()):
            first = 0 if packed else self._storages.flats[move.storage].data_ptr()
            for run in (move.box.packed() if packed else move.box).runs(size_of(entry.dtype)):
                for found in (found for piece in entry.pieces for found in compose(piece, run)):
                    width, count, apart = found.width, found.count, (found.source_stride, found.target_stride)
                    if count > 1 and apart == (width, width):
                        width, count, apart = width * count, 1, (0, 0)
                    yield Block(
                        found.source, first + found.target, bucket.first + found.source, width, count, *apart,
                        apart[0], region=found.source // bucket.stride, group=part,
                    )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- the load
    def load(self, index: int, slots: Sequence[torch.Tensor]) -> None:
        """Loads bucket number ``index`` from the slot that it is in, or from one per segment (uint8); copies may still
        run when it returns."""
        bucket = self.manifest.buckets[index]
        memory = BucketMemory(slots, bucket.stride, bucket.world)
        copies, reads = self._ready[index]
        copies.run(memory, self._read_sums)
        reads.run(memory, self._read_sums, copy=False)
        whole = self._assembler.tensors(memory, self._works[index].whole)
        if self.map.why_own_load:
            self._model.load_weights(whole)
            return
        for name, tensor in whole:  # in scratch memory
            for _, move in self._moves[name]:
                flat = self._storages.flats[move.storage]
                target_view(flat, move.box, move.dtype).copy_(source_view(tensor, move.box))

    @property
    def obstacle(self) -> str:
        """The reason why parameters may not be read where they lie; empty when they may."""
        if self.device.type == "cuda" and not self._copier.kernel:
            return "there is no Triton kernel in the engine"
        if self.map.why_own_load:
            return f"the model loads the tensors itself: {self.map.why_own_load}"
        return next((f"{name} is copied through scratch memory" for name in self._by_scratch), "")

    def load_in_place(self, locations: Sequence[Location], place: int, regions: Regions) -> None:
        """Loads everything from where the trainer ranks hold it; copies may still run when it returns. ``locations``:
        of all ranks of the group, mapped by ``regions``; ``place``: which of them is on this device. Raises ValueError
        where they do not hold what the manifest says."""
        keys = tuple(location.key for location in locations)
        if self._in_place_tables is None or self._in_place_tables[0] != keys:
            found = [region for location in locations for region in location.regions]
            flats = [regions.flat(region) for region in found]
            own, starts = len(found), [*(flat.data_ptr() for flat in flats), 0]  # own: this process's memory
            memory = Memory(self.device, starts, flats)
            copies, reads, quantized = list[Block](), list[Block](), list[Block]()
            wheres = [_Where(number, bucket, locations, place) for number, bucket in enumerate(self.manifest.buckets)]
            for work, where in zip(self._works, wheres, strict=True):
                for moved in (moved for block in work.copies for moved in where.moved(block)):
                    in_fp8 = self._entries[self._hashed[moved.group]].dtype == dtype_name(FP8)
                    (quantized if in_fp8 and moved.ratio > 1 else copies).append(moved)
                reads.extend(moved for block in work.reads for moved in where.moved(block))
            for b in quantized:  # hashed where it has been written
                at = (b.target, 0, b.position, b.width, b.count, b.target_stride, 0, b.position_stride)
                reads.append(Block(*at, region=own, group=b.group))
            homes = [*((rank - place) % len(locations) for rank, each in enumerate(locations) for _ in each.regions), 0]
            prepared = self._copier.prepare(copies, homes), self._copier.prepare(reads, homes)
            self._in_place_tables = keys, memory, prepared, self._quantizing(quantized, wheres, homes)
        _, memory, (copied, read), tables = self._in_place_tables
        copied.run(memory, self._read_sums)
        for table in tables:
            table.run(0, memory.starts)
        read.run(memory, self._read_sums, copy=False)

    def _quantizing(self, blocks: list[Block], wheres: Sequence[_Where], homes: Sequence[int]) -> list[QuantizeTable]:
        """Tables of bf16 and of fp32 that goes to fp8. Raises ValueError where a matrix's scales lie in pieces."""
        if not blocks:
            return []
        places = dict[str, set[tuple[int, int]]]()  # of scales: region, and byte in it of the first one
        for where, bucket in zip(wheres, self.manifest.buckets, strict=True):
            for entry in (entry for entry in bucket.entries if entry.name.endswith(SCALE_SUFFIX)):
                for piece in entry.pieces:
                    moved = where.moved(Block(piece.source, 0, piece.source, 1))
                    places.setdefault(entry.name, set()).update((m.region, m.source - piece.target) for m in moved)
        found, size = dict[torch.dtype, list[Rectangle]](), self._model.fp8_block
        for block in blocks:
            name = self._hashed[block.group]
            (scales,) = places[name + SCALE_SUFFIX]
            read = found.setdefault(torch.bfloat16 if block.ratio == 2 else torch.float32, [])
            read += _rectangles(block, self._pieces[name], self._entries[name].shape[1], size[1], *scales)
        return [QuantizeTable(each, (dtype, torch.bfloat16), size, self.device, homes) for dtype, each in found.items()]

    def forget_locations(self) -> None:
        """Regions are about to be unmapped; mapped again, they may lie elsewhere."""
        self._in_place_tables = None

    def finish(self) -> None:
        """Ends the sync: derives what the model derives, and refreshes its copies. Raises ValueError where a tensor is
        incomplete."""
        self._assembler.finish()
        if self.map.derives and not self.map.why_own_load:  # an own load has derived by itself
            self._model.derive_after_load()
        self._put_back()
        self._model.refresh_copies()

    # ----------------------------------------------------------------------------------------------- what is reported
    def sums(self) -> bytes:
        """The hashes of what was read, of each of ``read_parts``, as little-endian int64. Waits for the device."""
        return bytes(self._read_sums.cpu().numpy().astype("<i8").tobytes())

    def held(self) -> Held:
        """Hashes what lies in the parameters now. Waits for the device."""
        sums, wider = self._held.sums(self._storages.flats)
        odd = [(self._names[move.tensor], flag) for move, flag in wider]
        for name, each, view in self._constants:
            odd.append((name, (view != bits_of(each, view) if any(each.bits) else view).any()))
        return Held(sums.cpu().numpy().astype("<i8").tobytes(), tuple(flagged(odd)))


class _Where:
    """The places of one bucket's bytes in the trainer's own memory."""

    def __init__(self, number: int, bucket: Bucket, locations: Sequence[Location], place: int) -> None:
        self._number, self._start = number, bucket.first
        rows: list[tuple[int, int, int, int, int]] = []
        first_region = 0
        for rank, location in enumerate(locations):
            if bucket.world > 1 or rank == place:
                held = np.frombuffer(location.runs[number], dtype="<i8").reshape(-1, 5)
                # The only segment of what every rank holds is the own rank's; its numbers count from 0 like the others'
                low = rank * bucket.stride if bucket.world > 1 else 0
                if len(held) and not low <= held[0, 0] <= held[-1, 0] < low + bucket.stride:
                    raise ValueError(f"trainer rank {rank} tells of bytes of bucket {number} that are not its own")
                rows.extend((o, n, first_region + r, source, ratio) for o, n, r, source, ratio in held.tolist())
            first_region += len(location.regions)
        self._rows = sorted(rows)
        self._partition = Partition([Run(first, first, nbytes) for first, nbytes, *_ in self._rows])

    def moved(self, block: Block) -> Iterator[Block]:
        """The same bytes, read from the regions."""
        read = Run(block.source, block.target, block.width, block.count, block.source_stride, block.target_stride)
        left = read.width * read.count
        for number, run in self._partition.meet(read):
            left -= run.width * run.count
            first, _, region, source, ratio = self._rows[number]
            yield Block(
                source + (run.source - first) * ratio, run.target, self._start + run.source, run.width, run.count,
                run.source_stride * ratio, run.target_stride, run.source_stride, region, block.group, ratio,
            )  # fmt: skip
        if left:
            last = read.source + (read.count - 1) * read.source_stride + read.width - 1
            raise ValueError(f"no trainer rank gave {left} of bytes {read.source} to {last} of bucket {self._number}")


def _rectangles(
    block: Block, pieces: Sequence[Run], columns: int, wide: int, scale_region: int, first_scale: int
) -> Iterator[Rectangle]:
    """The parts of a matrix in fp8 in a block of a trainer rank's values; its scales lie from ``first_scale`` on."""
    low, high = block.position, block.position + (block.count - 1) * block.position_stride + block.width
    # There may be many, and to compose one takes long
    near = [p for p in pieces if p.source < high and low < p.source + (p.count - 1) * p.source_stride + p.width]

    def in_matrix(first: int, stride: int) -> Iterator[Run]:
        run = Run(first, block.position, block.width, block.count, stride, block.position_stride)
        return (row for piece in near for each in compose(run, piece) for row in in_rows(each, columns))

    read = in_matrix(block.source // block.ratio, block.position_stride)
    written = in_matrix(block.target, block.target_stride)
    for one, other in zip(read, written, strict=True):
        yield Rectangle(
            *divmod(one.target, columns), one.count, one.width, block.region, one.source, one.source_stride,
            other.source, other.source_stride, scale_region, first_scale // 4, -(-columns // wide),
        )  # fmt: skip


class HeldHashes:
    """Hashes what parameters hold of each part of a tensor: those in the order of the tensor at once, the others one by
    one with their blocks. ``parts`` are moves, each with the dtype in which its tensor is hashed, and that tensor's
    pieces: runs from the places that count for the hash to its bytes."""

    def __init__(self, parts: Sequence[tuple[Move, str, Sequence[Run]]], copier: Copier) -> None:
        plain, self._reordered = list[Block](), list[tuple[Move, str, Prepared]]()
        self._device, self._count = copier.device, len(parts)
        for group, (move, dtype, pieces) in enumerate(parts):
            other = needs_reorder(move) or move.dtype != dtype
            box, region = (move.box.packed(), 0) if other else (move.box, move.storage)
            blocks = [
                Block(r.target, 0, r.source, r.width, r.count, r.target_stride, 0, r.source_stride, region, group)
                for run in box.runs(size_of(dtype))
                for piece in pieces
                for r in compose(piece, run)
            ]
            if other:
                self._reordered.append((move, dtype, copier.prepare(blocks)))
            else:
                plain += blocks
        self._plain = copier.prepare(plain)

    def sums(self, flats: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[Move, torch.Tensor]]]:
        """The hash of each part (int64), of the bytes of all storages; and of each move in a wider dtype, whether it
        holds what the narrower cannot."""
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        self._plain.run(memory_of(flats, self._device), sums, copy=False)
        odd = []
        for move, dtype, blocks in self._reordered:
            stored = target_view(flats[move.storage], move.box, move.dtype).contiguous().reshape(-1).view(torch.uint8)
            if move.dtype != dtype:
                wide = stored.view(getattr(torch, move.dtype))
                if (move.dtype, dtype) == ("float32", "bfloat16"):
                    narrow = (wide.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)  # keeps a NaN's bits
                else:
                    narrow = wide.to(getattr(torch, dtype))
                odd.append((move, ((wide != narrow.to(wide.dtype)) & ~wide.isnan()).any()))
                stored = narrow.view(torch.uint8)
            blocks.run(memory_of([stored], self._device), sums, copy=False)
        return sums, odd


def memory_of(flats: Sequence[torch.Tensor], device: torch.device) -> Memory:
    """Memory whose blocks count from the first byte of flat number ``region``; the flats are to be kept alive."""
    return Memory(device, [flat.data_ptr() for flat in flats], flats)


class Assembler:
    """Turns the entries of successive buckets into whole tensors.

    Peak memory beyond the staging slots: one tensor (its pieces joined) at a time, plus every tensor that is split
    over buckets and not yet complete, plus one half of a fused pair.
    """

    def __init__(self, names: frozenset[str], pairs: FusedPairs = ()) -> None:
        """``names``: all tensors of the sync; half of one of ``pairs`` waits only for a partner among them."""
        self._names, self._pairs = names, pairs
        self._partial: dict[str, tuple[torch.Tensor, int]] = {}  # with the bytes that have arrived
        self._waiting: dict[str, torch.Tensor] = {}

    def tensors(self, memory: BucketMemory, entries: tuple[Entry, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete with this bucket; they may alias ``memory`` unless that is shared."""
        for entry in entries:
            if (flat := self._join(memory, entry)) is not None:
                typed, strides = flat.view(getattr(torch, entry.dtype)), entry.strides
                whole = typed.view(entry.shape) if strides is None else typed.as_strided(entry.shape, strides)
                yield from self._release(entry.name, whole)

    def _join(self, memory: BucketMemory, entry: Entry) -> torch.Tensor | None:
        here = sum(piece.width * piece.count for piece in entry.pieces)
        if here == entry.nbytes and all(piece.count == 1 for piece in entry.pieces):
            parts = [memory.narrow(piece.source, piece.width) for piece in entry.pieces]
            # A copy where others read: some models write into what they are given
            return parts[0] if len(parts) == 1 and not memory.shared else torch.cat(parts)
        if entry.name in self._partial:
            partial, arrived = self._partial.pop(entry.name)
        else:
            partial, arrived = torch.empty(entry.nbytes, dtype=torch.uint8, device=memory.device), 0
        for piece in entry.pieces:
            slot, first = memory.holds(piece.source)
            copy_runs(slot, first, partial, piece.target, piece)
        if arrived + here == entry.nbytes:
            return partial
        self._partial[entry.name] = partial, arrived + here
        return None

    def _release(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        partner = partner_of(name, self._pairs)
        if partner is None or partner not in self._names:
            yield name, tensor  # without q_lora_rank there is nothing to fuse with
        elif partner in self._waiting:
            yield partner, self._waiting.pop(partner)
            yield name, tensor
        else:
            # A copy: the slot is reused before the partner arrives
            self._waiting[name] = tensor.clone()

    def finish(self) -> None:
        """Raises ValueError where a tensor or a fused pair is incomplete."""
        if self._partial or self._waiting:
            left = sorted([*self._partial, *self._waiting])
            raise ValueError(f"the sync ended with incomplete tensors: {', '.join(left[:10])}")


@torch.no_grad()
def refuse_rearranged(model: EngineModel, device: torch.device) -> None:
    """After a sync, does again what the engine does to parameters that it has loaded. Raises ValueError, with names and
    the remedy, where it changes or moves any, for a sync does not."""
    key, storages = LayoutKey(model), Storages(model.module)
    layout, before = key.now(), _hashes(storages, device)
    model.after_load()
    after = _hashes(storages, device)
    changed = [p.name for p, one, other in zip(storages.table, before, after, strict=True) if one != other]
    if changed or key.now() != layout:
        shown = some(changed) or "the places of parameters"
        raise ValueError(
            f"{model.engine} changes {shown} once they are loaded from a checkpoint, and not after a sync, so "
            f"{model.name} would compute with weights in another layout. {model.plain_layout}"
        )


def _hashes(storages: Storages, device: torch.device) -> list[int]:
    """The hash of all that lies in each storage; 0 for what is on another device."""
    flats = [flat if flat.device == device else flat[:0].to(device) for flat in storages.flats]
    sums = torch.zeros(len(flats), dtype=torch.int64, device=device)
    blocks = [Block(0, 0, 0, len(flat), region=n, group=n) for n, flat in enumerate(flats) if len(flat)]
    Copier(device, []).prepare(blocks).run(memory_of(flats, device), sums, copy=False)
    return list(sums.tolist())
