# SPDX-License-Identifier: Apache-2.0
"""Weights that the engine keeps in fp8 are quantized where they are packed, or by the engine rank that reads them.

Each travels as ``float8_e4m3fn``, with one fp32 scale per block of rows and columns, which the name with ``_scale_inv``
carries, as in DeepSeek's checkpoints. The engine names the weights and the size of a block. The arithmetic is that of
verl's ``fp8_kernel``: ``scale = max(largest magnitude, 1e-10) / 448``, and values times the scale's inverse, after a
cast to the dtype in which they would travel otherwise. Ranks that hold parts of a block exchange its magnitude, so
the bytes are those of the whole tensor, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.copies.packing import chunks_of
from verl_sync_plugin.copies.table import QuantizeTable, Rectangle, kernel_works, scales_of
from verl_sync_plugin.layout.strided import Run, compose, in_rows
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Base, Shard, Slice, View
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy, dtype_name
from verl_sync_plugin.trainers.lora import Merge, await_device
from verl_sync_plugin.transport.agreement import Agreement, await_collective

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MIN_AMAX = 1e-10  # of a block's largest magnitude
REMEDY = f"Remove actor_rollout_ref.rollout.quantization=fp8, or {TURN_OFF}."


@dataclass(frozen=True)
class _Weight:
    """A matrix of ``shape`` in blocks of ``block``, whose elements a base holds in ``runs``; ``first``: of its scales,
    among those of all weights."""

    name: str
    shape: tuple[int, int]
    runs: tuple[Run, ...]
    block: tuple[int, int]
    first: int

    @property
    def scales(self) -> tuple[int, int]:
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales[self.first : self.first + math.prod(self.scales)].view(self.scales)


@dataclass(eq=False)
class _Piece:
    """A base that travels: base ``inner`` of the trainer, with the quantized weights in it, of which one stands for all
    that are tied; or, with a ``unit`` and no weights, the scales of that."""

    inner: int
    base: Base
    weights: tuple[_Weight, ...] = ()
    unit: _Unit | None = None


class _Rectangle(NamedTuple):
    """``size[0]`` lines of ``size[1]`` elements of a weight, from ``row`` and ``column`` on; in what is read or written
    the first is element ``first``, and lines are ``stride`` apart."""

    weight: _Weight
    row: int
    column: int
    size: tuple[int, int]
    stride: int
    first: int

    def in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Part of some values: ``(n, rows of a block, m, columns of a block)``, with zeros where a block goes on."""
        part = values.as_strided(self.size, (self.stride, 1), values.storage_offset() + self.first)
        (high, wide), (lines, columns) = self.weight.block, self.size
        above, before = self.row % high, self.column % wide
        room = before, -(before + columns) % wide, above, -(above + lines) % high
        part = torch.nn.functional.pad(part, room) if any(room) else part
        return part.reshape(part.shape[0] // high, high, part.shape[1] // wide, wide)

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Those of its ``(n, m)`` blocks."""
        (high, wide), (lines, columns) = self.weight.block, self.size
        rows = slice(self.row // high, -(-(self.row + lines) // high))
        return self.weight.of(numbers)[rows, self.column // wide : -(-(self.column + columns) // wide)]


@dataclass(eq=False)
class _Unit:
    """Weights that lie in the same bases: the parts of one parameter. Their scales, ``[first, end)`` of all, are a base
    that travels after these parts."""

    first: int
    end: int = 0
    pieces: list[_Piece] = field(default_factory=list)


_Part = tuple[_Piece, Slice]  # what is measured or written at a time
_Tables = list[tuple[QuantizeTable, list[torch.Tensor]]]  # with what each reads


class QuantizingSource(ParameterSource):
    """Wraps ``inner``; the policy names what is quantized, and the dtype to which values are cast before.

    Device memory next to the buckets: 24 bytes per block of the model, half of them for a while. With the kernel
    some 48 more per block of this rank's, without it at most 15 per element of ``LONGEST_CHUNK`` for a while.
    """

    def __init__(
        self, inner: ParameterSource, policy: WirePolicy, device: torch.device, timeout_seconds: float
    ) -> None:
        self._inner, self._device, self._timeout = inner, device, timeout_seconds
        self._blocks, self._dtype = dict(policy.blocks), policy.dtype
        self._bases: tuple[Base, ...] = ()
        self._found: Sequence[Shard] = ()
        self._made: list[Shard] = []  # of these
        self._travels: list[_Piece] = []
        self._units: list[_Unit] = []  # in them
        self._done: set[int] = set()  # units whose scales are those of this sync, by their first
        self._largest = self._scales = self._inverse = torch.empty(0)
        sizes = {size for block in self._blocks.values() for size in block}
        fits = len(set(self._blocks.values())) == 1 and all(size & (size - 1) == 0 for size in sizes)
        old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)  # knows no fp8
        self._kernel = fits and not old and kernel_works(device)
        self._tables: dict[object, QuantizeTable] = {}
        self._launches: dict[bool, tuple[object, _Tables, list[int]]] = {}  # of ``_found``; True: they measure

    @property
    def readable_in_place(self) -> bool:
        return self._kernel and self._dtype == torch.bfloat16 and self._inner.readable_in_place

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        self._inner = self._inner.agree_on_layout(agreement)
        return self

    def release(self) -> None:
        self._done.clear()
        self._inner.release()
        if self._found is not self._inner.kept:
            self._found, self._made = (), []
            self._launches.clear()

    def shards(self) -> list[Shard]:
        self._done.clear()
        found = self._inner.shards()
        self.group = self._inner.group
        if found is not self._found or not self._made:
            self._launches.clear()
            self._made, self._bases, known = [], (), self._bases
            if (bases := tuple(shard.base for shard in found)) != known:
                self._lay_out(bases)
            self._bases, self._found = bases, found
            self._made = [self._shard(each) for each in self._travels]
        self._largest.zero_()
        return self._made

    # ---- which bases travel

    def _lay_out(self, bases: tuple[Base, ...]) -> None:
        self._tables.clear()
        self._travels, self._units, end = [], [], 0
        for key, parts in groupby(enumerate(bases), self._unit_key):
            if not key:
                self._travels += (_Piece(number, base) for number, base in parts)
                continue
            unit = _Unit(-(-end // 4) * 4)  # the kernel reads scales from a multiple of 16 bytes on
            for number, base in parts:
                alike: dict[object, list[View]] = {}
                for view in base.views:
                    alike.setdefault(view.name if view.shares else view.start, []).append(view)
                weights, scales, end = list[_Weight](), list[View](), unit.first
                for tied in alike.values():
                    name, (rows, columns) = tied[0].name, tied[0].shape
                    weight = _Weight(name, (rows, columns), tied[0].runs, self._blocks[name], end)
                    numel = math.prod(weight.scales)
                    scales += (View(view.name + SCALE_SUFFIX, weight.scales, end - unit.first, numel) for view in tied)
                    weights.append(weight)
                    end += numel
                in_fp8 = replace(base, dtype=dtype_name(FP8), itemsize=FP8.itemsize)
                unit.pieces.append(_Piece(number, in_fp8, tuple(weights), unit))
            unit.end = end
            lengths = end - unit.first, *(0 for _ in base.lengths[1:])  # the first rank sends them; all know them
            sent = Base(scales[0].name, "float32", 4, lengths, tuple(scales))
            self._travels += (*unit.pieces, _Piece(-1, sent, (), unit))
            self._units.append(unit)
        self._largest = torch.zeros(end, dtype=torch.float32, device=self._device)
        self._scales, self._inverse = torch.empty_like(self._largest), torch.empty_like(self._largest)

    def _unit_key(self, numbered: tuple[int, Base]) -> tuple[object, ...]:
        """Equal for parts of the same weights, which share their scales; empty for a base without any."""
        number, base = numbered
        views = [view for view in base.views if view.name in self._blocks]
        if 0 < len(views) < len(base.views):
            raise ValueError(f"{base.key!r} holds {views[0].name!r}, and the engine has a part of it in fp8. {REMEDY}")
        for view in views:
            if len(view.shape) != 2 or view.strides is not None:
                raise ValueError(
                    f"{view.name!r} of shape {view.shape} lies transposed or in another shape in the trainer, and the "
                    f"engine keeps it in fp8: weight sync quantizes contiguous matrices. {REMEDY}"
                )
        return tuple(view.name if view.shares else number for view in views)

    def _shard(self, each: _Piece) -> Shard:
        if each.unit is None:
            return self._found[each.inner]
        if not each.weights:
            scales = self._scales[each.unit.first : each.unit.first + each.base.held(self.rank)]
            return Shard(each.base, lambda: scales, run=scales)
        shard = self._found[each.inner]
        merge = partial(self._quantized, each, shard.merge)
        return Shard(each.base, shard.local, merge, run=shard.run, fill=self._fill)

    # ---- the scales

    def _inner_of(self, bases: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(inner for base in bases if (inner := self._travels[base].inner) >= 0))

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Finds the scales of the weights in these bases; where ``inner`` prepares nothing, of all weights at once."""
        units = [] if self._done else self._units
        if self._inner.prepares:
            found = {unit.first: unit for base in bases if (unit := self._travels[base].unit) is not None}
            units = [found[first] for first in sorted(found.keys() - self._done)]
            needed = {*self._inner_of(bases), *(piece.inner for unit in units for piece in unit.pieces)}
            if needed:
                yield from self._inner.prepare(tuple(sorted(needed)), [self._inner_of(bucket) for bucket in ahead])
        if not units:
            return
        pieces = [piece for unit in units for piece in unit.pieces]
        parts = ((each, Slice(each.inner, 0, each.base.held(self.rank), 0)) for each in pieces)
        for at in self._run_kernel(units, parts, measure=True):
            self._measure(pieces[at])
        span = slice(units[0].first, units[-1].end)  # of what lies between, too: it stays, or comes later
        largest = self._largest[span].clone()
        if self.group is not None:
            yield
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, self.group, async_op=True)
            await_collective(work, self._device, self._timeout)
            await_device(self._device, self._timeout)  # what follows may wait for it without a bound
        if self._kernel:
            self._scales[span], self._inverse[span] = scales_of(largest, MIN_AMAX, FP8_MAX)
        else:  # by a tensor: a number would be inverted
            self._scales[span] = largest.clamp(min=MIN_AMAX) / largest.new_tensor([FP8_MAX])
            self._inverse[span] = 1.0 / self._scales[span]
        self._done |= {unit.first for unit in units}  # last: what a failure leaves is no preparation

    @torch.no_grad()
    def _measure(self, piece: _Piece) -> None:
        """Adds what this rank holds of a base to the largest magnitudes; NaN and Inf show where they are packed."""
        shard = self._found[piece.inner]
        run = shard.local()
        for begin, count in chunks_of(run.numel()):
            values = run[begin : begin + count].to(self._device, non_blocking=True)
            values = (values if shard.merge is None else shard.merge(values, begin)).to(self._dtype)
            for each in self._cut(piece, begin, count):
                found = each.in_blocks(values).abs().amax((1, 3)).float()
                found = torch.where(found.isfinite(), found, torch.inf)
                largest = each.of(self._largest)
                torch.maximum(largest, found, out=largest)

    # ---- the weights

    def _quantized(self, piece: _Piece, merge: Merge | None, values: torch.Tensor, begin: int) -> torch.Tensor:
        """Makes fp8 of a part of a base, as ``Shard.merge`` does of any."""
        values = (values if merge is None else merge(values, begin)).to(self._dtype)
        result = torch.empty(values.shape, dtype=FP8, device=values.device)
        for each in self._cut(piece, begin, values.numel()):
            inverse = each.of(self._inverse)[:, None, :, None]
            made = (each.in_blocks(values).float() * inverse).clamp_(-FP8_MAX, FP8_MAX).to(FP8).flatten(2).flatten(0, 1)
            made = made[each.row % each.weight.block[0] :, each.column % each.weight.block[1] :]
            result.as_strided(each.size, (each.stride, 1), each.first).copy_(made[: each.size[0], : each.size[1]])
        return result

    def _cut(self, piece: _Piece, begin: int, count: int) -> Iterator[_Rectangle]:
        """Cuts ``count`` elements of this rank's run of a base; rectangles are relative to ``begin``."""
        begin += piece.base.first(self.rank)
        for weight in piece.weights:
            held = (each for run in weight.runs for each in compose(Run(0, begin, count), run))
            for run in (part for each in held for part in in_rows(each, weight.shape[1])):
                row, column = divmod(run.target, weight.shape[1])
                yield _Rectangle(weight, row, column, (run.count, run.width), run.source_stride, run.source)

    # ---- by the kernel, where parameters lie on the device and nothing is merged into them

    def _fill(
        self, segment: int, slices: Sequence[Slice], hashed: tuple[Mapping[str, int], torch.Tensor] | None = None
    ) -> Sequence[Slice]:
        """Quantizes slices of bases; see ``Fill``."""
        parts = ((self._travels[each.base], each) for each in slices)
        return [slices[at] for at in self._run_kernel(slices, parts, segment, hashed)]

    def _run_kernel(
        self, what: object, parts: Iterable[_Part], target: int = 0,
        hashed: tuple[Mapping[str, int], torch.Tensor] | None = None, measure: bool = False,
    ) -> list[int]:  # fmt: skip
        """Starts one launch for all parts of a dtype; returns the numbers of those that the kernel cannot read. Both
        are found once for the same ``what``, of which these are the parts, and the same shards."""
        groups, sums = hashed or ({}, None)
        known, tables, left = self._launches.get(measure, (None, [], []))
        if known is not what:
            tables, left = self._tables_of(parts, groups, measure)
            self._launches[measure] = what, tables, left
        scales = self._largest if measure else self._scales
        for table, found in tables:
            table.run(target, [*(run.data_ptr() for run in found), scales.data_ptr()], sums, measure)
        return left

    def _tables_of(self, parts: Iterable[_Part], groups: Mapping[str, int], measure: bool) -> tuple[_Tables, list[int]]:
        alike, left = dict[torch.dtype, list[tuple[_Part, torch.Tensor]]](), list[int]()
        if not self._kernel:
            return [], [number for number, _ in enumerate(parts)]
        for number, (piece, part) in enumerate(parts):
            shard = self._found[piece.inner]
            run = shard.local() if shard.run is None else shard.run
            if shard.merge is not None or run.device != self._device or not run.is_contiguous():
                left.append(number)
            elif part.count(piece.base, self.rank) > 0:
                alike.setdefault(run.dtype, []).append(((piece, part), run))
        tables: _Tables = []
        for dtype, found in alike.items():
            key = (dtype, measure, bool(groups), *(part for part, _ in found))
            if (table := self._tables.get(key)) is None:
                block, dtypes = next(iter(self._blocks.values())), (dtype, self._dtype)
                rectangles = self._in_memory([part for part, _ in found], groups)
                table = self._tables[key] = QuantizeTable(rectangles, dtypes, block, self._device)
            tables.append((table, [run for _, run in found]))
        return tables, left

    def _in_memory(self, parts: Sequence[_Part], groups: Mapping[str, int]) -> Iterator[Rectangle]:
        """Parts as the kernel reads them, each from a base of its own; the scales are after these."""
        for base, (piece, part) in enumerate(parts):
            for each in self._cut(piece, part.begin, part.count(piece.base, self.rank)):
                source, target = each.first + part.begin, each.first + part.offset
                yield Rectangle(
                    each.row, each.column, *each.size, base, source, each.stride, target, each.stride,
                    len(parts), each.weight.first, each.weight.scales[1], target, groups.get(each.weight.name, 0),
                )  # fmt: skip
