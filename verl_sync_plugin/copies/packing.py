# SPDX-License-Identifier: Apache-2.0
"""Fills this rank's segment of a bucket: by the copy kernel where it can, hashing and checking what is packed.

A slot is uint8 and holds a bucket or, of a sharded plan, this rank's segment; it begins with byte ``Plan.origin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from weakref import proxy

import torch

from verl_sync_plugin.copies.copier import Copier, Memory, Prepared
from verl_sync_plugin.copies.plain import Block
from verl_sync_plugin.layout.strided import Partition, Run
from verl_sync_plugin.layout.tensors import Bucket, Extent, Fill, Plan, Shard, Slice, extents_of, numbers_of

# How a shard is read: by the kernel as it is, by the kernel cast from fp32 to bf16, by torch, or by its own ``fill``,
# which also reads it in place
AS_IS, CAST, BY_TORCH, QUANTIZED = range(4)
# Elements that are moved to the device or merged at a time; a short rest joins the chunk before it. In fp32 a whole
# bucket of them would take twice its size
MERGE_CHUNK = 1 << 24
LONGEST_CHUNK = MERGE_CHUNK + MERGE_CHUNK // 8


class RunPlaces:
    """The places of the runs of some bases; an offloaded one comes back elsewhere.

    Attributes:
        bases: those given, each once.
        kinds: how each base's run is read. Another object only where one is read in another way.
        places: for each base, the address of its run and its dtype; 0 where there is no ``run``.
        addresses: of these.
    """

    def __init__(self, bases: Sequence[int], device: torch.device) -> None:
        self.bases = tuple(dict.fromkeys(bases))
        self.kinds: dict[int, int] = {}
        self.places: list[tuple[int, torch.dtype]] = []
        self.addresses: list[int] = []
        self._device = device

    def locate(self, shards: Sequence[Shard]) -> bool:
        """Looks the runs up; returns whether any is elsewhere, or of another dtype, than the last time."""
        places = [
            (0, torch.uint8) if (run := shards[base].run) is None else (run.data_ptr(), run.dtype)
            for base in self.bases
        ]
        if places == self.places:
            return False
        self.places, self.addresses = places, [address for address, _ in places]
        if (kinds := {base: self._kind(shards[base]) for base in self.bases}) != self.kinds:
            self.kinds = kinds
        return True

    def _kind(self, shard: Shard) -> int:
        run, merged = shard.run, shard.merge is not None and shard.fill is None
        if merged or run is None or run.device != self._device or not run.is_contiguous() or run.data_ptr() % 16:
            return BY_TORCH
        if shard.fill is not None:
            return QUANTIZED if run.dtype in (torch.bfloat16, torch.float32) else BY_TORCH
        wire = getattr(torch, shard.base.dtype)
        if run.dtype == wire:
            return AS_IS
        return CAST if (run.dtype, wire) == (torch.float32, torch.bfloat16) else BY_TORCH


class PackTable:
    """One bucket of a packer, or several that are only read. ``alone``: slices to be packed one by one before ``run``,
    which are all of them without the kernel.

    Args:
        packer: the packer.
        buckets: those of the table.
        found: of the buckets' bases, where parameters are read in place; may leave out those of which this rank holds
            nothing. Slices that are packed alone are then left out, too.
    """

    def __init__(self, packer: Packer, buckets: Sequence[Bucket], found: RunPlaces | None = None) -> None:
        # A proxy, for the packer holds this: both go, with what is on the device, as soon as it is dropped
        self._packer, self._buckets, self._read_alone = proxy(packer), buckets, found is None
        self.found = found or RunPlaces([base for bucket in buckets for base in bucket.bases], packer.copier.device)
        self._kinds: dict[int, int] | None = None
        self._table: Prepared | None = None
        self.alone: list[Slice] = []

    def refresh(self) -> None:
        """After ``found`` has looked. A shard that moved costs new addresses only, one of another kind a table."""
        if self._kinds is not self.found.kinds:
            self._kinds = self.found.kinds
            self.alone = [part for bucket in self._buckets for part in bucket.slices if self._alone(part)]
            blocks = [block for bucket in self._buckets for block in self._blocks(bucket)]
            self._table = self._packer.copier.prepare(blocks)

    def _alone(self, part: Slice) -> bool:
        return not self._packer.copier.kernel or self.found.kinds.get(part.base) in (BY_TORCH, QUANTIZED)

    def run(self, sums: torch.Tensor, flags: torch.Tensor, slot: torch.Tensor | None = None, origin: int = 0) -> None:
        """Starts the copies into a slot, which begins with byte ``origin`` of the bucket, or only reads. ``sums`` and
        ``flags``: see ``KernelTable.run``."""
        assert self._table is not None, "refresh() comes first"
        start, flats = (0, []) if slot is None else (slot.data_ptr() - origin, [slot])
        memory = Memory(self._packer.copier.device, [start, *self.found.addresses], flats)
        self._table.run(memory, sums, slot is not None and self._packer.copier.kernel, flags, start)

    def _blocks(self, bucket: Bucket) -> Iterator[Block]:
        """Only bytes that belong to a tensor are packed. What was packed alone is copied onto itself, to be read; it is
        in region 0, the slot."""
        places = {base: place for place, base in enumerate(self.found.bases, 1)}
        packer, rank = self._packer, self._packer.rank
        extents = extents_in_segment(bucket, rank)
        partition = Partition([Run(extent.first, extent.first, extent.end - extent.first) for extent in extents])
        segment = segment_of(bucket, rank)
        for part in bucket.slices:
            base, alone = packer.plan.bases[part.base], self._alone(part)
            count = part.count(base, rank)
            if count <= 0 or (alone and not self._read_alone):
                continue
            ratio = 2 if not alone and self.found.kinds.get(part.base) == CAST else 1
            dtype = base.dtype if "float" in base.dtype else ""
            size = base.itemsize
            run = Run(segment * bucket.stride + part.offset, part.begin * size, count * size)  # and where in the shard
            for index, found in partition.meet(run):
                at, position, group = found.source, bucket.first + found.source, packer.tensors[extents[index].names[0]]
                place, source = (0, at) if alone else (places[part.base], found.target * ratio)
                yield Block(source, at, position, found.width, region=place, group=group, ratio=ratio, dtype=dtype)


def segment_of(bucket: Bucket, rank: int) -> int:
    """A rank's segment of a bucket; there is only one of what every rank holds."""
    return rank if bucket.world > 1 else 0


def extents_in_segment(bucket: Bucket, rank: int) -> list[Extent]:
    """The bytes of a rank's segment that belong to a tensor."""
    low = segment_of(bucket, rank) * bucket.stride
    return extents_of(bucket.entries, low, low + bucket.stride)


class Packer:
    """Keeps tables from sync to sync.

    Args:
        device: where the slots are.
        plan: all buckets.
        rank: this rank's place among the owners of a sharded base.
    """

    def __init__(self, device: torch.device, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.copier = plan, rank, Copier(device, [])
        self.tensors = numbers_of(bucket.entries for bucket in plan.buckets)
        self._sums = torch.zeros(len(self.tensors), dtype=torch.int64, device=device)
        self._flags = torch.zeros(len(self.tensors), dtype=torch.int64, device=device)
        self._tables: dict[int, PackTable] = {}
        self._whole: PackTable | None = None
        self._quantized: list[Slice] = []  # where they are only read, with their bytes of the bucket
        self._groups: dict[str, int] = {}  # numbers of tensors of which one of tied ones counts

    def begin(self) -> None:
        """Once per sync, before the first bucket."""
        self._sums.zero_()
        self._flags.zero_()

    def pack(self, index: int, memory: torch.Tensor, shards: list[Shard]) -> None:
        """Copies this rank's runs of bucket number ``index`` into its segment of a slot (``memory``), cast to the wire
        dtype; copies may still run when it returns. ``shards``: all of this rank, by base index."""
        bucket = self.plan.buckets[index]
        origin = self.plan.origin(bucket, self.rank)
        segment = memory.narrow(0, segment_of(bucket, self.rank) * bucket.stride - origin, bucket.stride)
        table = self._tables.get(index)
        if table is None:
            table = self._tables[index] = PackTable(self, [bucket])
        table.found.locate(shards)
        table.refresh()
        pack_slices(segment, table.alone, shards)
        table.run(self._sums, self._flags, memory, origin)

    def hash_parameters(self, shards: list[Shard], found: RunPlaces) -> None:
        """Hashes and checks everything where it lies, for engine ranks that read it there; may return early.
        ``shards``: all of this rank, by base index, none of which ``ParameterLocator`` refuses, and their places."""
        if not self.copier.kernel:
            slot = torch.empty(self.plan.slot_bytes, dtype=torch.uint8, device=self.copier.device)
            for index in range(len(self.plan.buckets)):
                self.pack(index, slot, shards)
            return
        if self._whole is None or self._whole.found is not found:
            self._whole = PackTable(self, self.plan.buckets, found)
            for bucket in self.plan.buckets:
                low, kinds = bucket.first + segment_of(bucket, self.rank) * bucket.stride, found.kinds
                quantized = [part for part in bucket.slices if kinds.get(part.base) == QUANTIZED]
                self._quantized += (replace(part, offset=low + part.offset) for part in quantized)
                extents = extents_in_segment(bucket, self.rank) if quantized else []
                self._groups |= {name: self.tensors[extent.names[0]] for extent in extents for name in extent.names}
        self._whole.refresh()
        self._whole.run(self._sums, self._flags)
        if self._quantized and (fill := shards[self._quantized[0].base].fill):
            left = fill(0, self._quantized, (self._groups, self._sums))
            assert not left, "of another kind"

    def sums(self) -> torch.Tensor:
        """The hash of what this rank packed of each tensor: int64 of shape ``(tensors,)``, numbered by ``numbers_of``,
        on the CPU. Waits for the device."""
        return self._sums.cpu()

    def broken(self) -> list[str]:
        """The tensors with a NaN or Inf in this rank's part, of tied ones perhaps the first. Waits for the device."""
        names = list(self.tensors)  # in the order of their numbers
        return [names[number] for number in self._flags.nonzero().flatten().tolist()]


@torch.inference_mode()  # a model has hundreds of them, and autograd's bookkeeping is a tenth of the host's time
def pack_slices(segment: torch.Tensor, parts: Sequence[Slice], shards: list[Shard]) -> None:
    """Copies slices of shards into a segment (uint8), cast and merged on the way.

    Args:
        segment: begins at a multiple of 16 bytes of its storage; its length is one, too.
        parts: which; of what another rank owns nothing is copied.
        shards: all shards of this rank, by base index.
    """
    typed: dict[str, torch.Tensor] = {}
    at_once: dict[Fill | None, list[Slice]] = {}
    for part in parts:
        at_once.setdefault(shards[part.base].fill, []).append(part)
    rest = [part for fill, some in at_once.items() for part in (fill(segment.data_ptr(), some) if fill else some)]
    for part in rest:
        shard = shards[part.base]
        run, base = shard.local(), shard.base
        count = min(part.end, run.numel()) - part.begin
        if count <= 0:
            continue
        target = typed.get(base.dtype)
        if target is None:
            target = typed[base.dtype] = segment.view(getattr(torch, base.dtype))
        _pack_run(target, part.offset // base.itemsize, run, part.begin, count, shard.merge)


def _pack_run(
    target: torch.Tensor, place: int, run: torch.Tensor, begin: int, count: int,
    merge: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> None:  # fmt: skip
    """Elements ``[begin, begin + count)`` of a run, to ``place`` of the target on."""
    moves = run.device != target.device
    if merge is None and not moves:
        target[place : place + count].copy_(run[begin : begin + count])
        return
    for done, length in chunks_of(count):
        first, low = begin + done, place + done
        chunk = run[first : first + length]  # quicker than ``narrow``, as are all slices here
        if moves:  # then cast: a casting copy across devices would cast on the host
            chunk = chunk.to(target.device, non_blocking=True)
        if merge is not None:
            chunk = merge(chunk, first)
        target[low : low + length].copy_(chunk)


def chunks_of(count: int) -> Iterator[tuple[int, int]]:
    """Cuts a run of ``count`` elements into chunks: the first element and the length of each."""
    begin = 0
    while begin < count:
        length = count - begin if count - begin <= LONGEST_CHUNK else MERGE_CHUNK
        yield begin, length
        begin += length
