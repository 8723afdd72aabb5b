# SPDX-License-Identifier: Apache-2.0
"""Finds out what a model's own load does with the tensors of a sync: the engine rank's ``LoadMap``.

One dry load (``recorder.py``) proposes it. A load of marks proves it: the model's own ``load_weights`` is given random
numbers in place of weights, and what then lies where a tensor is said to go must be the marks that were given. Unlike
weights, marks are never alike (norms are all ones, biases all zeros), so nothing that is mixed up looks right. Where
the load does more than copy, the model loads everything itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.copies.plain import flat_storage
from verl_sync_plugin.engine.model import EngineModel, partner_of
from verl_sync_plugin.engine.recorder import Recording, Write, meta_of, model_tensors, record, storage_of
from verl_sync_plugin.layout.load_map import (
    Box,
    Constant,
    LoadMap,
    Move,
    NotCopied,
    Pairs,
    Spans,
    StateTensor,
    Storage,
    Tensors,
    box_of,
    box_spans,
    full_box,
    length,
    pairs_of,
    size_of,
    spans_of,
    without,
)
from verl_sync_plugin.layout.tensors import SCALE_SUFFIX, Entry, align, dtype_name, place_of

CHUNK_BYTES = 256 << 20  # of marks given to the model in one call; bounds the memory that they take
SEED = 20_251
POISON = 0xA5  # every byte, before the load of marks, of what it is to write and no tensor holds
FP8 = torch.float8_e4m3fn
UNQUANTIZED = "Remove actor_rollout_ref.rollout.quantization=fp8"
# Clears the highest bit of every exponent, in bf16, fp16 and the upper half of fp32: no NaN or Inf of 16 or 32 bits
FINITE = -0x4001
MOST_RUNS = 1 << 14  # of one copy
SHORT_RUN = 32  # bytes; what lies in shorter ones is brought into the tensor's order before it is hashed


class Storages:
    """The storages of a model, by number.

    Attributes:
        table: what of them a sync has to write.
        flats: all bytes of each: uint8 of shape ``(n,)``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        persistent, parameters = set(module.state_dict(keep_vars=True)), dict(module.named_parameters())
        found: dict[int, tuple[str, torch.Tensor, dict[Box, StateTensor]]] = {}
        for name, tensor in model_tensors(module):
            box = box_between(tensor.detach(), tensor.detach())
            _, _, in_it = found.setdefault(storage_of(tensor), (name, tensor, {}))
            if name in persistent:
                in_it.setdefault(box, StateTensor(name, dtype_name(tensor.dtype), box, name not in parameters))
        self._number = {storage: number for number, storage in enumerate(found)}
        self.table = tuple(Storage(name, tuple(in_it.values())) for name, _, in_it in found.values())
        self.flats = [flat_storage(tensor) for _, tensor, _ in found.values()]

    def of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage that a tensor lies in."""
        return self._number.get(storage_of(tensor))


class Places:
    """Remembers where a model's parameters, buffers and tensor attributes lie. CUDA graphs read them there, and a load
    may put some elsewhere."""

    def __init__(self, module: torch.nn.Module) -> None:
        weights = {storage_of(parameter) for parameter in module.parameters()}
        self._first: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (owned, key, tensor.detach())
            for each in module.modules()
            for owned in (each._parameters, each._buffers, vars(each))
            for key, tensor in owned.items()
            # A view of a parameter moves with it
            if isinstance(tensor, torch.Tensor) and (owned is each._parameters or storage_of(tensor) not in weights)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what a load has put elsewhere. Raises ValueError for what has another shape or dtype there."""
        for owned, key, first in self._first:
            now = owned.get(key)
            if not isinstance(now, torch.Tensor) or now.is_meta or first.is_meta or place_of(now) == place_of(first):
                continue
            if (now.shape, now.dtype) != (first.shape, first.dtype):
                raise ValueError(f"a load gives {key!r} another shape or dtype. To train this model, {TURN_OFF}.")
            first.copy_(now.clone() if storage_of(now) == storage_of(first) else now)
            if isinstance(now, torch.nn.Parameter):
                now.data = first
            else:
                owned[key] = first


def introduce(model: EngineModel, tensors: Tensors, device: torch.device) -> tuple[LoadMap, Storages]:
    """Returns the map of an engine rank's model on ``device``, and its storages. Overwrites parameters with marks, so a
    sync of these tensors has to follow. Raises ValueError where the load cannot be recorded, RuntimeError where there
    is no device memory for marks, and whatever the model raises when it loads them."""
    introduction = _Introduction(model, tensors, device)
    try:
        return introduction.run()
    except torch.OutOfMemoryError as error:
        room = "Lower rollout.gpu_memory_utilization; rollout.multi_stage_wake_up=True, the default, makes room, too."
        raise RuntimeError(f"no device memory for a load of marks, which proves its map: {error}. {room}") from error
    finally:
        introduction.places.restore()


def kept_in_fp8(model: EngineModel, sources: Sequence[Entry]) -> tuple[str, ...]:
    """The matrices, by name, that the model keeps in fp8; none once the trainer sends scales. A dry load is offered all
    of them in fp8: for a parameter in fp8 many of SGLang's loaders take nothing else."""
    quantized = any(source.name.endswith(SCALE_SUFFIX) for source in sources)
    if quantized or all(parameter.dtype != FP8 for parameter in model.module.parameters()):
        return ()
    offered = {each.name for each in sources if len(each.shape) == 2 and "float" in each.dtype}
    dry = [replace(source, dtype=dtype_name(FP8)) if source.name in offered else source for source in sources]
    places = Places(model.module)
    try:
        kept = {write.name for write in record(model, dry, UNQUANTIZED).writes if write.target.dtype == FP8}
    finally:
        places.restore()
    return tuple(sorted(offered & kept))


class _Introduction:
    def __init__(self, model: EngineModel, tensors: Tensors, device: torch.device) -> None:
        self._model, self._device = model, device
        self._names, self._numbers, self._entries = tensors.names, tensors.numbers, tensors.entries
        self._owners = {name: tensors.names[tensors.owners[number]] for name, number in tensors.numbers.items()}
        # Also keeps them alive: else what a load allocates takes the identity of what it replaces
        self.places = Places(model.module)
        self._moves: list[Move] = []
        self._constants: list[Constant] = []
        self._why_own_load = ""
        self._not_copied: dict[str, str] = {}
        self._unplaced: dict[str, str] = {}

    @torch.no_grad()
    def run(self) -> tuple[LoadMap, Storages]:
        model = self._model
        before = _tensor_places(model.module)
        storages = {name: storage_of(each) for name, each in model_tensors(model.module)}
        refreshed = {storage_of(copy): storage_of(weight) for weight, copy in model.refreshed}
        recording = record(model, list(self._entries.values()))
        known = [w for w in recording.writes if w.name or w.source is not None or storage_of(w.target) not in refreshed]
        recording.writes = known
        for name, into in ((each.name, each.target.dtype) for each in known if each.name):
            scaled, sent = name + SCALE_SUFFIX in self._entries, self._entries[name].dtype
            if (into == FP8 and sent != dtype_name(FP8)) or (into != FP8 and scaled):
                how = "into fp8 without a scale" if into == FP8 else f"in fp8 into {dtype_name(into)}"
                what = f"{model.engine}'s load of {model.name} puts {name} {how}"
                raise ValueError(f"{what}. {UNQUANTIZED}, or use another model.")
        moved = {name for name, _ in before ^ _tensor_places(model.module)}
        self.places.restore()
        self._storages = Storages(model.module)
        odd = {storages[name]: f"its load lays {name} out again" for name in moved if name in storages}
        if not model.can_derive:
            odd |= dict.fromkeys(recording.computed_from.difference(refreshed.values()), "its load computes from it")
        self._propose(recording, odd)
        self._prove(moved)
        self._add_constants()
        own = next((f"{name}: {why}" for name, why in self._not_copied.items()), self._why_own_load)
        found = LoadMap(
            f"{model.engine}'s {model.name}", self._storages.table, tuple(self._moves), tuple(self._constants),
            own, self._leftovers(recording), self._theirs(moved) if own else (),
            tuple((number, why) for name, number in self._numbers.items() if (why := model.why_skipped(name))),
            tuple((self._numbers[name], why) for name, why in self._unplaced.items()),
            bool(recording.computed_from) and model.can_derive,
        )  # fmt: skip
        return found, self._storages

    # ---------------------------------------------------------------------------------------------- what is proposed
    def _propose(self, recording: Recording, odd: Mapping[int, str]) -> None:
        """Makes of a recording the state that it leaves: of each byte, who wrote it last."""
        left, unplaced = self._not_copied, self._unplaced
        left.update(recording.refused)
        unplaced.update(recording.refused)
        writes = self._writes = [
            _Writing(write, storage)
            for write in recording.writes
            if write.target.numel() and (storage := self._storages.of(write.target)) is not None
        ]
        for write in recording.writes:
            if write.name and (why := odd.get(storage_of(write.target))):
                left.setdefault(write.name, why)
                if self._storages.of(write.target) is None:
                    unplaced.setdefault(write.name, why)
        for each in writes:
            if each.box is not None and (why := self._why_no_move(each.box, each.write.target.device)):
                left.setdefault(each.name, why)
                unplaced.setdefault(each.name, why)
        for earlier, later in _overlapping(writes):
            _resolve_overlap(earlier, later, left)
        for each in (each for each in writes if not each.dead):
            if each.box is not None and each.name not in unplaced:
                dtype = dtype_name(each.write.target.dtype)
                self._moves.append(Move(self._numbers[each.name], each.storage, dtype, each.box))
            elif isinstance(each.write.source, float):
                if len(each.rest):
                    self._constants.append(_constant(each.storage, each.rest, each.write.source, each.write.target))
            elif not each.name:
                self._why_own_load = "its load writes what it computes in addition to the tensors"

    def _why_no_move(self, box: Box, device: torch.device) -> str:
        if any(not (step and other) for _, step, other in box.dims):
            return "has elements that are each written to several places"
        if box.packed().run_count > MOST_RUNS:
            return "is copied in too many runs"
        return f"is kept on {device}, not on {self._device}" if device != self._device else ""

    # ------------------------------------------------------------------------------------------------ what is proven
    def _prove(self, moved: set[str]) -> None:
        """Has the model load marks. Raises ValueError where it does not do what was recorded."""
        model, flats = self._model, self._storages.flats
        places = _tensor_places(model.module)
        left = {"", *self._not_copied}
        unproven = [(w.storage, w.rest) for w in self._writes if not w.dead and w.name in left]
        for storage, spans in unproven:
            for first, end in spans.tolist():
                flats[storage][first:end].fill_(POISON)
        for marks in self._marks():
            model.load_weights(iter(marks))
            del marks  # or two chunks would be there at a time
        if more := {name for name, _ in places ^ _tensor_places(model.module)} - moved:
            raise self._other(f"lays {min(more)} out again with real tensors, and did not without them")
        self.places.restore()
        for storage, spans in unproven:
            parts = (flats[storage][first:end] for first, end in spans.tolist())
            if len(spans) and all(part.amin() == part.amax() == POISON for part in parts):
                name = self._storages.table[storage].name
                raise self._other(f"does not write {name} with real tensors, and did without them")
        wrong = self._misplaced()
        for name in sorted(wrong - self._not_copied.keys()):
            raise self._other(f"puts {name} elsewhere with real tensors than without them")
        self._unplaced.update((name, self._not_copied[name]) for name in sorted(wrong))
        self._moves = [move for move in self._moves if self._names[move.tensor] not in self._unplaced]
        lasting = [each for each in self._constants if _holds(each, flats[each.storage])]
        if len(lasting) < len(self._constants):
            self._why_own_load = "a constant next to its weights changes with what is loaded"
        self._constants = lasting

    def _marks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Chunks of marks, the same at every call: a model may write into what it is given."""
        for number, chunk in enumerate(_chunks(self._entries, self._owners, self._model)):
            yield _marks_of(chunk, self._owners, torch.Generator(self._device).manual_seed(SEED + number))

    def _misplaced(self) -> set[str]:
        """The tensors of which some mark is not where a move puts it."""
        moves: dict[str, list[Move]] = {}
        for move in self._moves:
            moves.setdefault(self._names[move.tensor], []).append(move)
        odd: list[tuple[str, torch.Tensor]] = []
        for marks in self._marks():
            odd += [(name, self._differs(mark, move)) for name, mark in marks for move in moves.get(name, ())]
            del marks
        return set(flagged(odd))

    def _differs(self, mark: torch.Tensor, move: Move) -> torch.Tensor:
        """A flag: the model does not hold all elements of a move as the mark has them."""
        bits = getattr(torch, f"int{8 * size_of(move.dtype)}")
        given = source_view(mark, move.box).to(getattr(torch, move.dtype)).view(bits)
        stored = target_view(self._storages.flats[move.storage], move.box, move.dtype).view(bits)
        stored.bitwise_xor_(given)  # in the model's own memory: elsewhere it would take some
        flag = stored.any()
        stored.bitwise_xor_(given)
        return flag

    def _other(self, what: str) -> ValueError:
        return ValueError(f"{self._model.engine}'s load of {self._model.name} {what}. To train this model, {TURN_OFF}.")

    def _add_constants(self) -> None:
        """Those of parameters that the engine sets where no checkpoint has them, and this one has not."""
        written = {each.storage for each in self._writes}
        for name, value in self._model.constants.items():
            tensor = self._model.module.get_parameter(name)
            storage = self._storages.of(tensor)
            if storage is not None and storage not in written:
                self._constants.append(_constant(storage, _spans_in_storage(tensor), value, tensor))

    def _theirs(self, moved: set[str]) -> tuple[tuple[int, Pairs], ...]:
        """All that the model's own load writes."""
        found: dict[int, list[np.ndarray]] = {}
        for each in self._writes:
            found.setdefault(each.storage, []).append(each.spans)
        for number, storage in enumerate(self._storages.table):
            again = [box_spans(t.box, False, size_of(t.dtype)) for t in storage.tensors if t.name in moved]
            found.setdefault(number, []).extend(again)
        return tuple((number, pairs_of(spans_of(parts))) for number, parts in found.items())

    def _leftovers(self, recording: Recording) -> tuple[NotCopied, ...]:
        of_name: dict[str, list[_Writing]] = {}
        for each in self._writes:
            of_name.setdefault(each.name, []).append(each)
        found = []
        for name, why in sorted(self._not_copied.items()):
            source, writes = self._entries[name], of_name.get(name, [])
            if name in recording.taken:
                parts = [box_spans(full_box(source.shape, source.strides), True)]
            else:
                parts = [box_spans(each.box, True) for each in writes if each.box is not None and not each.dead]
            dtype = source.dtype
            if "float" in dtype:
                kept = max([dtype, *(dtype_name(each.write.target.dtype) for each in writes)], key=size_of)
                dtype = "" if name in recording.computed else kept
            found.append(NotCopied(self._numbers[name], why, dtype, pairs_of(spans_of(parts))))
        return tuple(found)


class _Writing:
    """A ``Write``, and where it goes.

    Attributes:
        dead: overwritten whole.
    """

    dead = False

    def __init__(self, write: Write, storage: int) -> None:
        self.write, self.storage, self.name = write, storage, write.name
        target = write.target
        self.box = box_between(write.source, target) if isinstance(write.source, torch.Tensor) else None
        size = target.element_size()
        span = sum((many - 1) * step for many, step in zip(target.shape, target.stride(), strict=True)) + 1
        self.low = int(target.storage_offset()) * size
        self.high = self.low + span * size

    @cached_property
    def spans(self) -> Spans:
        return _spans_in_storage(self.write.target)

    @cached_property
    def rest(self) -> Spans:
        """Those that last, of a constant."""
        return self.spans


def _overlapping(writes: Sequence[_Writing]) -> Iterator[tuple[_Writing, _Writing]]:
    """Pairs of writes that share bytes, the earlier one first."""
    order = {id(each): number for number, each in enumerate(writes)}
    reaching: list[_Writing] = []  # those that end after the present one begins
    for write in sorted(writes, key=lambda each: (each.storage, each.low)):
        reaching = [other for other in reaching if other.storage == write.storage and other.high > write.low]
        for other in reaching:
            if length(without(other.spans, write.spans)) < length(other.spans):
                yield (other, write) if order[id(other)] < order[id(write)] else (write, other)
        reaching.append(write)


def _resolve_overlap(earlier: _Writing, later: _Writing, left: dict[str, str]) -> None:
    """Decides about bytes that are written twice. What only an order of writes gives is left to the model."""
    if earlier.dead or later.dead:
        return
    if not earlier.name and isinstance(earlier.write.source, float):  # a constant as ground
        earlier.rest = without(earlier.rest, later.spans)
    elif later.box is not None and not len(without(earlier.spans, later.spans)):
        earlier.dead = True  # the same tensor again, or another one over it, whose bytes then count as unused
    else:
        constant = isinstance(later.write.source, float)
        why = "is overwritten by a constant in part" if constant else "is written where the load writes more than it"
        for name in {earlier.name, later.name} - {""}:
            left.setdefault(name, why)


# ----------------------------------------------------------------------------------------------------------- marks
def needs_reorder(move: Move) -> bool:
    """True if a move puts the elements in another order than the tensor's, or in far too many short runs."""
    return move.box.run_count > (1 if move.box.width * size_of(move.dtype) < SHORT_RUN else MOST_RUNS)


def target_view(flat: torch.Tensor, box: Box, dtype: str) -> torch.Tensor:
    """The elements of a box in memory, of ``dtype``, a view with its dimensions; ``flat``: all bytes (uint8) of its
    storage."""
    typed = flat[: len(flat) // size_of(dtype) * size_of(dtype)].view(getattr(torch, dtype))
    return typed.as_strided([d[0] for d in box.dims], [d[2] for d in box.dims], typed.storage_offset() + box.target)


def source_view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box in the tensor, a view with its dimensions."""
    return tensor.as_strided([d[0] for d in box.dims], [d[1] for d in box.dims], tensor.storage_offset() + box.source)


def flagged(flags: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """The names of which a flag (of shape ``()``) is set, each once. Waits for the device."""
    found = torch.stack([flag for _, flag in flags]).tolist() if flags else []
    return list(dict.fromkeys(name for (name, _), flag in zip(flags, found, strict=True) if flag))


def _marks_of(
    chunk: Sequence[Entry], owners: Mapping[str, str], generator: torch.Generator
) -> list[tuple[str, torch.Tensor]]:
    """Tied tensors hold the same marks, in memory of their own: some models write into what they are given. A chunk's
    bits are made at once: one by one, those of 18867 tensors took longer than their load."""
    metas = [meta_of(source) for source in chunk]
    sizes = [meta.untyped_storage().nbytes() for meta in metas]
    halves, device = (sum(map(align, sizes)) // 2,), generator.device
    bits = torch.randint(-(1 << 15), 1 << 15, halves, generator=generator, device=device, dtype=torch.int16)
    bits = bits.bitwise_and_(FINITE).view(torch.uint8)
    flats: dict[str, torch.Tensor] = {}
    marks, start = [], 0
    for source, meta, nbytes in zip(chunk, metas, sizes, strict=True):
        owner = owners[source.name]
        if owner in flats:
            flat = flats[owner].clone()
        elif meta.dtype.is_floating_point:
            flat = flats[owner] = bits[start : start + nbytes]
        else:
            small, shape = 2 if meta.dtype == torch.bool else 64, (nbytes // meta.dtype.itemsize,)
            numbers = torch.randint(0, small, shape, generator=generator, device=device)
            flat = flats[owner] = numbers.to(meta.dtype).view(torch.uint8)
        start += align(nbytes)
        marks.append((source.name, flat.view(meta.dtype).as_strided(source.shape, meta.stride())))
    return marks


def _chunks(sources: Mapping[str, Entry], owners: Mapping[str, str], model: EngineModel) -> Iterator[list[Entry]]:
    """As many tensors in one go as make up ``CHUNK_BYTES``, each with those it is tied to or fused with."""
    tied: dict[str, list[str]] = {}
    for name in sources:
        tied.setdefault(owners[name], []).append(name)
    left = set(sources)
    chunk: list[Entry] = []
    nbytes = 0
    for first in sources:
        together = [first] if first in left else []
        for name in together:  # grows on the way
            more = [*tied[owners[name]], partner_of(name, model.fused_pairs)]
            together += [each for each in more if each in left and each not in together]
        left.difference_update(together)
        chunk += [sources[name] for name in together]
        nbytes += sum(sources[name].nbytes for name in together)
        if nbytes >= CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


# ------------------------------------------------------------------------------------------------------- small things
def box_between(source: torch.Tensor, target: torch.Tensor) -> Box:
    """The box of ``target.copy_(source)``."""
    source = source.expand(target.shape)
    first = int(source.storage_offset()), int(target.storage_offset())
    return box_of(target.shape, source.stride(), target.stride(), *first)


def _spans_in_storage(tensor: torch.Tensor) -> Spans:
    return spans_of([box_spans(box_between(tensor, tensor), False, tensor.element_size())])


def _constant(storage: int, spans: Spans, value: float, tensor: torch.Tensor) -> Constant:
    """``value`` in the dtype of a tensor."""
    bits = torch.full((1,), value, dtype=tensor.dtype).view(torch.uint8).numpy().tobytes()
    return Constant(storage, pairs_of(spans), bits)


def _tensor_places(module: torch.nn.Module) -> set[tuple[str, tuple[object, ...]]]:
    """Finds the place of every tensor of the model, by name."""
    return {(name, place_of(tensor)) for name, tensor in model_tensors(module)}


def _holds(constant: Constant, flat: torch.Tensor) -> bool:
    return all(torch.equal(view, bits_of(constant, view)) for view in views_of(constant, flat))


def views_of(constant: Constant, flat: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a constant; one view where its spans follow each other evenly."""
    spans = constant.spans
    (first, end), *rest = spans
    step = rest[0][0] - first if rest else 0
    if all(b == a + end - first and a == first + step * n for n, (a, b) in enumerate(spans)):
        shape, strides = (len(spans), end - first), (step or end - first, 1)
        return [flat.as_strided(shape, strides, flat.storage_offset() + first)]
    return [flat[a:b].unsqueeze(0) for a, b in spans]


def bits_of(constant: Constant, view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view of a constant."""
    bits = torch.frombuffer(bytearray(constant.bits), dtype=torch.uint8).to(view.device)
    return bits.repeat(view.shape[1] // len(bits)).expand(view.shape)
