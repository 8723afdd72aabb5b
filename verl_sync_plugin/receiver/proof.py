# SPDX-License-Identifier: Apache-2.0
"""Tells what lies in the engine's own parameters after a sync: the engine rank's half of ``verify/destination.py``.

Where the bytes of a tensor lie in the parameters is taken from the model's own load: proposed by its recording
(``placement.py``) and proven by a load of marks (``marks.py``), once per layout. After a sync every such place is read
again, and hashed as the trainer hashes what it packs: by the place in the bucket. So both hashes are equal if and only
if the parameters hold what was sent, whoever copied it. What is read is taken from no copy plan or replay; of a plan is
only said whether the marks prove it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from verl_sync_plugin.copies.blocks import Block
from verl_sync_plugin.copies.copier import Prepared
from verl_sync_plugin.copies.hulls import hulls_of, numbers_of
from verl_sync_plugin.layout.strided import Run, compose
from verl_sync_plugin.layout.tensors import Entry
from verl_sync_plugin.receiver.constants import differs, flags_of, hold, kept_constants
from verl_sync_plugin.receiver.copy_plan import NAMED, CopyPlan, known_tensors, sources_of
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.receiver.layout_key import Layout, LayoutKey
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.marks import ELSEWHERE, Reader, misplaced
from verl_sync_plugin.receiver.placement import Held, owners_of, placements
from verl_sync_plugin.receiver.recorder import model_tensors, record
from verl_sync_plugin.receiver.recording import Recording
from verl_sync_plugin.transport.proof import Parts, Placed, Proven
from verl_sync_plugin.transport.protocol import Manifest

MOST_PARTS = 16  # of one tensor that are hashed apart
MOST_BLOCKS = 1 << 14  # of one tensor
RE_LAID = "its load lays parameters out anew"
DERIVED = "what the model computes from parameters behind its load"


@dataclass(frozen=True)
class _Work:
    """What is read after a sync.

    Attributes:
        placed: what is told of it.
        groups: what each sum is of.
        plain: reads what lies in the order of its tensor.
        turned: what does not, with its blocks.
        narrowed: see ``Proven``.
    """

    placed: Placed
    groups: list[list[Held]]
    plain: Prepared
    turned: list[tuple[Held, list[Block]]]
    narrowed: tuple[tuple[int, str], ...]


class DestinationProof:
    """Of one model and one manifest. Device memory: the tables (see ``KernelTable``).

    Args:
        model: of this engine rank.
        manifest: what the buckets hold.
        device: where the model is.
    """

    def __init__(self, model: EngineModel, manifest: Manifest, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._numbers = numbers_of(manifest.buckets)
        self._pieces: dict[str, list[Run]] = {}
        self._nbytes: dict[str, int] = {}
        for entry in itertools.chain.from_iterable(manifest.buckets):
            self._note(entry)
        self._sources = sources_of([entry for bucket in manifest.buckets for entry in bucket])
        self._owners, self._tied_in_part = owners_of(map(hulls_of, manifest.buckets), self._sources)
        self._key = LayoutKey(model)
        self._told: Placed | None = None
        self._forget()

    def _note(self, entry: Entry) -> None:
        self._pieces.setdefault(entry.name, []).extend(entry.pieces)
        self._nbytes[entry.name] = entry.nbytes

    def _forget(self) -> None:
        """Lets go of all parameters."""
        self._layout: Layout | None = None
        self._no_room = ""  # in words, where there was too little memory to find anything out
        self._filled = False  # the load of marks left all constants in place
        self._reader: Reader | None = None
        self._parts: dict[str, list[list[Held]]] = {}  # by the name that is counted
        self._left_out: dict[str, str] = {}
        self._constants: list[tuple[torch.Tensor, float]] = []
        self._unproven: tuple[tuple[str, int, int], ...] = ()
        self._work: _Work | None = None

    def begin(self, layout: object) -> None:
        """At the start of every sync: lets go of parameters that are elsewhere by now, and of what was not found out.

        Args:
            layout: ``LayoutKey.now()``.
        """
        if self._no_room or (self._layout is not None and layout != self._layout):
            self._forget()

    def prepare(self, recording: Recording | None) -> None:
        """Before anything of a sync is loaded: finds out, once per layout, where the model's load puts every tensor.

        Overwrites parameters with marks, so the sync has to be loaded then.

        Args:
            recording: of the load, if there is one already.
        """
        if self._layout is not None:
            return
        recording = recording or record(self._model, self._sources)
        held, left_out = placements(recording, self._sources)
        left_out.update(self._tied_in_part)
        if not recording.ended:
            left_out.update({source.name: recording.spoiled for source in self._sources})
        self._reader = reader = Reader(known_tensors(self._model.module), self._device)
        left_out.update({each.name: RE_LAID for each in held if not reader.knows(each)})
        held = [each for each in held if each.name not in left_out]
        try:
            left_out.update(misplaced(self._model, self._sources, self._owners, held, reader))
        except torch.OutOfMemoryError as error:
            self._no_room = f"no device memory for a load of marks: {error}"
            left_out.update({source.name: self._no_room for source in self._sources})
        self._filled = hold((fill.target, fill.value) for fill in recording.fills)
        self._constants = kept_constants(recording)
        if recording.derives:
            left_out[DERIVED] = "is computed"
        self._left_out, self._layout = left_out, self._key.now()
        self._take([each for each in held if each.name not in left_out])

    def judge(self, plan: CopyPlan) -> tuple[bool, list[str]]:
        """What the marks say of a plan: whether they were found exactly where it copies to, all of them, and its
        constants beside them; and the tensors whose marks were found to be elsewhere."""
        found: dict[str, set[Run]] = {name: set() for name in plan.planned}
        for held in (held for parts in self._parts.values() for part in parts for held in part):
            if held.name in found and not held.turned:
                found[held.name].update(held.absolute())
        proven = self._filled and all(
            name not in self._left_out and found[name] == set(planned.runs) for name, planned in plan.planned.items()
        )
        return proven, [name for name in plan.planned if self._left_out.get(name) == ELSEWHERE]

    def _take(self, held: Iterable[Held]) -> None:
        """Compiles what is to be read; the parameters of which nothing else is said are the unproven ones."""
        counted: dict[str, list[Held]] = {}
        ledger = Ledger(self._model.module)
        held = self._alike(list(held))
        for each in held:
            if len(each.runs) * len(self._pieces[each.name]) > MOST_BLOCKS:
                self._left_out[each.name] = "arrives in many small pieces"
                continue
            counted.setdefault(self._owners.get(each.name, each.name), []).append(each)
            ledger.note(each.target)
        for target, _ in self._constants:
            ledger.note(target)
        self._unproven, self._work = ledger.coverage().missing, None
        self._parts = {
            name: [[each] for each in parts] if len(parts) <= MOST_PARTS else [parts] for name, parts in counted.items()
        }

    def _alike(self, held: list[Held]) -> list[Held]:
        """Without tensors that the model keeps in several dtypes, of which some are narrower."""
        dtypes: dict[str, set[tuple[torch.dtype, int]]] = {}
        for each in held:
            dtypes.setdefault(self._owners.get(each.name, each.name), set()).add((each.dtype, each.ratio))
        mixed = {each.name for each in held if len(dtypes[self._owners.get(each.name, each.name)]) > 1}
        self._left_out.update(dict.fromkeys(mixed, "is kept in several dtypes"))
        return [each for each in held if each.name not in mixed]

    def proven(self, always: bool) -> Proven:
        """What lies in the parameters now. Waits for the device.

        Args:
            always: tell in any case what is hashed.
        """
        assert self._reader is not None, "prepare() comes first"
        if self._key.now() != self._layout:
            self._drop_moved()
        work = self._work = self._work or self._compile(self._reader)
        sums = torch.zeros(len(work.groups), dtype=torch.int64, device=self._device)
        self._reader.run(work.plain, sums)
        for held, blocks in work.turned:
            self._reader.add_turned(held, blocks, sums)
        odd = [(held.name, held.beside()) for held, _ in work.turned if held.widened]
        odd += [(self._name_of(target), differs(target, value)) for target, value in self._constants]
        return Proven(
            sums=sums.cpu().numpy().astype("<i8").tobytes(),
            placed=work.placed if always or work.placed != self._told else None,
            left_out=tuple(self._left_out.items()),
            unproven=self._unproven,
            narrowed=work.narrowed,
            nbytes=sum(held.nbytes for parts in work.groups for held in parts),
            no_room=self._no_room,
            changed=tuple(name for (name, _), flag in zip(odd, flags_of(flag for _, flag in odd), strict=True) if flag),
        )

    def told(self, proven: Proven) -> None:
        """The trainer knows what was told."""
        self._told = proven.placed or self._told

    def _compile(self, reader: Reader) -> _Work:
        kinds: dict[tuple[int, Parts], list[str]] = {}
        for name, parts in self._parts.items():
            read = tuple(tuple(sorted(run.read() for held in part for run in held.runs)) for part in parts)
            kinds.setdefault((self._nbytes[name] // parts[0][0].ratio, read), []).append(name)
        groups = [part for names in kinds.values() for name in names for part in self._parts[name]]
        placed = tuple((*kind, tuple(self._numbers[name] for name in names)) for kind, names in kinds.items())
        blocks: list[Block] = []
        turned: list[tuple[Held, list[Block]]] = []
        for group, together in enumerate(groups):
            for held in together:
                if held.turned:
                    turned.append((held, self._blocks(held, group, 0)))
                else:
                    blocks += self._blocks(held, group, reader.base(held))
        dtypes = [(self._numbers[name], parts[0][0]) for name, parts in self._parts.items()]
        narrowed = tuple((number, str(held.dtype).removeprefix("torch.")) for number, held in dtypes if held.ratio > 1)
        return _Work(placed, groups, reader.copier.prepare(blocks), turned, narrowed)

    def _blocks(self, held: Held, group: int, base: int) -> list[Block]:
        """Where the bytes of a tensor that a place holds are, with their places in the buckets."""
        pieces = [piece.narrowed(held.ratio) if held.ratio > 1 else piece for piece in self._pieces[held.name]]
        found = [run for piece in pieces for placed in held.runs for run in compose(piece, placed)]
        return [
            Block(r.target, 0, r.source, r.width, r.count, r.target_stride, 0, r.source_stride, base=base, group=group)
            for r in found
        ]

    def _drop_moved(self) -> None:
        """The sync's own load has moved parameters: what was there before says nothing any more."""
        storages = {tensor.untyped_storage()._cdata for tensor in known_tensors(self._model.module)}
        held = [each for parts in self._parts.values() for part in parts for each in part]
        moved = {each.name for each in held if each.target.untyped_storage()._cdata not in storages}
        self._left_out.update(dict.fromkeys(moved, RE_LAID))
        self._constants = [each for each in self._constants if each[0].untyped_storage()._cdata in storages]
        self._take([each for each in held if each.name not in moved])

    def _name_of(self, target: torch.Tensor) -> str:
        storage = target.untyped_storage()._cdata
        tensors = self._model.module.named_parameters(remove_duplicate=False)
        return next((name for name, tensor in tensors if tensor.untyped_storage()._cdata == storage), "a buffer")


@torch.no_grad()
def refuse_rearranged(model: EngineModel, device: torch.device) -> None:
    """Does again what the engine does to parameters that it has loaded: after a sync, which does not, it must change
    none.

    Args:
        model: of this engine rank, after a sync.
        device: where the model is.

    Raises:
        ValueError: it changes some or moves them; names these and the remedy.
    """
    key, reader = LayoutKey(model), Reader(known_tensors(model.module), device)
    named = {tensor.untyped_storage()._cdata: name for name, tensor in model_tensors(model.module)}
    layout, before = key.now(), reader.whole()
    model.after_load()
    after = reader.whole()
    changed = [named[storage] for storage, number in reader.numbers.items() if before[number] != after[number]]
    if changed or key.now() != layout:
        shown = ", ".join(changed[:NAMED]) or "the places of parameters"
        raise ValueError(
            f"{model.engine} changes {shown} once they are loaded from a checkpoint, and not after a sync, so "
            f"{model.name} would compute with weights in another layout. {model.plain_layout}"
        )
