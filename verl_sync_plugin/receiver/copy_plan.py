# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which tensor go where in the model: made from a recording, by name, before anything has moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.receiver.engine_model import EngineModel, FusedPairs, partner_of
from verl_sync_plugin.receiver.intervals import intervals, region_of
from verl_sync_plugin.receiver.layout_key import LayoutKey
from verl_sync_plugin.receiver.order import fills_contradict, mixed, overwritten
from verl_sync_plugin.receiver.recorder import model_tensors, record
from verl_sync_plugin.receiver.recording import Copy, Recording, Source
from verl_sync_plugin.receiver.uses import uses_in

# Runs shorter than this are no business of a byte copier (a transposed copy has runs of one element)
SHORTEST_RUN = 32
MOST_RUNS = 1 << 16
NAMED = 5  # names of a list in a message
REMEDY = "Set actor_rollout_ref.rollout.custom.sync.enabled=False to run stock verl."


@dataclass(frozen=True)
class Planned:
    """The copies of one tensor.

    Attributes:
        dtype: what travels.
        target_dtype: what the model holds; the copy casts when they differ.
        runs: from the tensor's bytes to absolute addresses; their widths are of the tensor's bytes.
    """

    dtype: torch.dtype
    target_dtype: torch.dtype
    runs: tuple[Run, ...]

    @property
    def casts(self) -> bool:
        return self.dtype != self.target_dtype

    def target_runs(self) -> Iterator[tuple[int, int, int, int]]:
        """The bytes written: address, width, count and bytes from one to the next."""
        for part in self.runs:
            width = part.width * self.target_dtype.itemsize // self.dtype.itemsize
            joined = part.count > 1 and part.target_stride == width
            yield part.target, width * part.count if joined else width, 1 if joined else part.count, part.target_stride


@dataclass
class CopyPlan:
    """What a sync can replay. Valid while ``layout_of`` the model stays what it was.

    Attributes:
        planned: by name; a tensor that the model skips has no runs.
        refused: names that take the model's own path, and why.
        fills: constants to write again (padding), with the value.
        derives: the model must derive again what it computes from parameters, after the copies.
        uses: the bytes of every tensor that the model's load uses (see ``uses``); ``None`` when unknown.
        pairs: of tensors that are refused together.
        recording: what the plan was made of.
    """

    planned: dict[str, Planned] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    derives: bool = False
    uses: dict[str, tuple[Run, ...]] | None = None
    pairs: FusedPairs = ()
    recording: Recording | None = None

    def refuse(self, name: str, why: str) -> None:
        """Leaves a tensor to the model, with the one it is fused with: alone, the model would hold it back for good."""
        for each in (name, partner_of(name, self.pairs)):
            if each is not None and self.planned.pop(each, None) is not None:
                self.refused[each] = why

    def lines_for_log(self, tensors: int, how: str) -> Iterator[str]:
        """What of ``tensors`` is replayed ``how``, and why some are not."""
        yield f"once their plan is proven, {tensors - len(self.refused)} of {tensors} tensors go by {how}"
        of_reason: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            of_reason.setdefault(why, []).append(name)
        for why, names in of_reason.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            yield f"through load_weights: {', '.join(names[:NAMED])}{more} ({why})"

    def target_runs(self) -> Iterator[tuple[int, int, int, int]]:
        """The bytes that a replay writes: address, width, count and bytes from one to the next."""
        for planned in self.planned.values():
            yield from planned.target_runs()
        for first, end in intervals(region_of(target) for target, _ in self.fills).tolist():
            yield first, end - first, 1, 0


def make_plan(model: EngineModel, sources: Sequence[Source], device: torch.device | None = None) -> CopyPlan:
    """Records the model's load and keeps of it what is plain copies.

    Never raises for a model that cannot be recorded: then every name takes the model's own path.

    Args:
        model: of this engine rank.
        sources: the tensors of a sync.
        device: where copies are made. To what the model keeps elsewhere a copier, which goes by addresses alone, must
            not write. ``None``: nothing is elsewhere.
    """
    before = LayoutKey(model).now()
    recording = record(model, sources)
    uses = uses_in(recording, sources)
    if not recording.spoiled and LayoutKey(model).now() != before:
        recording.spoiled = "its load re-lays parameters"
    if not recording.spoiled and recording.derives and not model.can_derive:
        recording.spoiled = "its load computes from parameters, and the model cannot do that again without loading"
    if not recording.spoiled and fills_contradict(recording.fills):
        recording.spoiled = "its load writes one constant over another"
    if recording.spoiled:
        return CopyPlan(refused={source.name: recording.spoiled for source in sources}, uses=uses, recording=recording)
    fills = [(fill.target, fill.value) for fill in recording.fills]
    plan = CopyPlan({}, dict(recording.refused), fills, recording.derives, uses, model.fused_pairs, recording)
    for name in overwritten(recording.copies, recording.fills):
        plan.refused.setdefault(name, "is overwritten by a constant in part")  # a replay writes constants first
    copies: dict[str, list[Copy]] = {source.name: [] for source in sources}
    for copy in recording.copies:
        copies[copy.name].append(copy)
    for source in sources:
        if source.name not in plan.refused:
            _accept(plan, source, copies[source.name], device)
    _refuse_overlaps(plan)
    left = [*recording.others, *(copy for copy in recording.copies if copy.name in plan.refused)]
    for name in mixed([copy for copy in recording.copies if copy.name in plan.planned], left):
        plan.refused.setdefault(name, "is written where the model's own path writes, too")
    for name, why in list(plan.refused.items()):
        plan.refuse(name, why)  # with the one it is fused with
    return plan


def _accept(plan: CopyPlan, source: Source, copies: Sequence[Copy], device: torch.device | None) -> None:
    elsewhere = {copy.target.device for copy in copies} - {device}
    if device is not None and elsewhere:
        plan.refused[source.name] = f"is kept on {', '.join(sorted(map(str, elsewhere)))}, not on {device}"
        return
    targets = {copy.target.dtype for copy in copies}
    if len(targets) > 1:
        plan.refused[source.name] = f"is copied as {targets}"
        return
    runs: list[Run] = []
    for copy in copies:
        part = runs_of(copy.source, copy.target)
        if part is None:
            plan.refused[source.name] = "is copied in runs too short"
            return
        runs.extend(part)
    target = targets.pop() if targets else source.dtype
    # SGLang's vision-language models load a tied embedding twice, once as the head, which is the same parameter
    plan.planned[source.name] = Planned(source.dtype, target, tuple(dict.fromkeys(runs)))


def runs_of(source: torch.Tensor, target: torch.Tensor) -> list[Run] | None:
    """A copy as runs of consecutive bytes, or ``None`` when it has no long ones.

    Args:
        source: view of a tensor that starts at its storage's first byte; only its layout is used.
        target: what it is copied to, of a shape it broadcasts to.
    """
    if target.numel() == 0:
        return []
    if source.shape != target.shape:
        source = source.expand(target.shape)
    dims = _merged(target.shape, source.stride(), target.stride())
    size, step, target_step = dims.pop()
    if (step, target_step) != (1, 1):
        dims.append((size, step, target_step))
        size = 1
    many, grown = source.element_size(), target.element_size()
    if dims and size * many < SHORTEST_RUN:
        return None
    count, stride, target_stride = dims.pop() if dims else (1, 0, 0)
    starts = [(0, 0)]
    for length, outer, target_outer in dims:
        starts = [(a + i * outer, b + i * target_outer) for a, b in starts for i in range(length)]
    if (count > 1 and stride < size) or len(starts) > MOST_RUNS:
        return None
    first, address = int(source.storage_offset()) * many, target.data_ptr()
    return [
        Run(first + a * many, address + b * grown, size * many, count, stride * many, target_stride * grown)
        for a, b in starts
    ]


def _merged(shape: Sequence[int], strides: Sequence[int], target_strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Dimensions as (size, stride, stride of the target), neighbours that are one run on both sides joined."""
    dims: list[tuple[int, int, int]] = []
    for size, stride, other in zip(shape, strides, target_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride and dims[-1][2] == size * other:
            dims[-1] = (dims[-1][0] * size, stride, other)
        else:
            dims.append((size, stride, other))
    return dims or [(1, 1, 1)]


def _refuse_overlaps(plan: CopyPlan) -> None:
    """Replay keeps no order between copies, so bytes that two of them write take the model's own path."""
    intervals: list[tuple[int, int, str]] = []
    for name, planned in plan.planned.items():
        for address, width, count, stride in planned.target_runs():
            intervals.extend((address + i * stride, address + i * stride + width, name) for i in range(count))
    intervals.sort()
    reached, owner = 0, ""
    for first, end, name in intervals:
        if first < reached:
            for one in {name, owner}:
                plan.refused[one] = "is written where another tensor is"
        if end > reached:
            reached, owner = end, name
    for name in plan.refused:
        plan.planned.pop(name, None)


def sources_of(entries: Sequence[Any]) -> list[Source]:
    """The tensors of a manifest's entries, each once, in order."""
    found: dict[str, Source] = {}
    for entry in entries:
        if entry.name not in found:
            found[entry.name] = Source(entry.name, getattr(torch, entry.dtype), entry.shape, entry.strides)
    return list(found.values())


def known_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer with elements, for looking targets up by address."""
    return [tensor for _, tensor in model_tensors(model) if tensor.numel()]
