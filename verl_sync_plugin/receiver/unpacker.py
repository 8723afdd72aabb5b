# SPDX-License-Identifier: Apache-2.0
"""Loads buckets into the model: by the model's own ``load_weights``, or by replaying what that does.

A plan is replayed once it is proven. Where the first sync begins with a load of marks (``proof.py``), these prove it.
Otherwise the first sync goes the model's own way and is the reference: every byte that a replay would have written is
compared (by hash) with what the model wrote, and a tensor that differs keeps the model's way. Moved, it starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from verl_sync_plugin.copies.bucket_memory import BucketMemory
from verl_sync_plugin.copies.copier import Copier
from verl_sync_plugin.copies.hulls import numbers_of
from verl_sync_plugin.log import say
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.receiver.copy_plan import REMEDY, CopyPlan, known_tensors, make_plan, sources_of
from verl_sync_plugin.receiver.cuts import scattered
from verl_sync_plugin.receiver.direct import DirectLoads, obstacle
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.receiver.layout_key import Layout, LayoutKey
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.marks import ELSEWHERE
from verl_sync_plugin.receiver.recording import Recording
from verl_sync_plugin.receiver.replay import Comparison, Replay
from verl_sync_plugin.receiver.use_teller import UseTeller
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.memory.regions import Regions
from verl_sync_plugin.transport.protocol import Manifest, Readings


class Unpacker:
    """Belongs to one model and one manifest.

    Args:
        model: of this engine rank.
        manifest: what the buckets hold.
        device: where the slots are.
    """

    def __init__(self, model: EngineModel, manifest: Manifest, device: torch.device) -> None:
        self._model = model
        self.manifest = manifest
        self.device = device
        self._key = LayoutKey(model)
        self.layout: object = None  # of the plan
        self.recording: Recording | None = None  # that was made for this sync
        self._replay: Replay | None = None
        self._comparison: Comparison | None = None
        self.plan, self._trusted = CopyPlan(), False  # the plan's ``refused`` are left to the model's own load
        self._settled = self._judged = False  # it is known what the plan is good for; marks have been loaded for it
        self._hashed = self._replay_watched = False
        self._copier: Copier | None = None
        numbers = numbers_of(manifest.buckets)
        self._tensors, self._names = tuple(numbers), frozenset(numbers)
        model.sent = self._names
        self._sources = sources_of([entry for bucket in manifest.buckets for entry in bucket])
        self.uses = UseTeller(model, self._sources, manifest.buckets, numbers)
        self._assembler = Assembler(self._names, model.fused_pairs)
        self._sums = torch.zeros(len(self._tensors), dtype=torch.int64, device=device)
        self._whole: frozenset[str] = frozenset()
        self._told: Readings | None = None
        self.replayed = (0, 0)  # tensors and bytes that this sync replays
        self.direct = DirectLoads(manifest, device)

    def begin(self, layout: Layout, copy_plan: bool, hashed: bool, whole: Sequence[int] = ()) -> None:
        """Decides how this sync loads. Never fails because a model cannot be planned.

        Args:
            layout: of the model now.
            copy_plan: whether to plan at all.
            hashed: whether to hash what is read.
            whole: numbers of tensors to be hashed whole.
        """
        self._hashed, self.recording = hashed, None
        before, self._whole = self._whole, frozenset(self._tensors[number] for number in whole)
        if layout != self.layout or not self._settled:
            self.layout, self._trusted, self._judged, self._settled = layout, False, False, not copy_plan
            self._prepare(self._recorded(copy_plan))
        elif before != self._whole:
            self._replay = self._compile()
        self._start()

    def trust(self, judge: Callable[[CopyPlan], tuple[bool, list[str]]]) -> None:
        """After ``begin``, once per layout by ``DestinationProof.judge``: a plan that is proven and leaves nothing to
        the model is replayed at once; what is wrong is left to the model, for weights that are alike would hide it.

        Raises:
            ValueError: something is wrong in a plan that earlier syncs have replayed; the next sync leaves it out.
        """
        if self._judged or self._key.now() != self.layout:
            return
        self._judged, (proven, wrong) = True, judge(self.plan)
        for name in wrong:
            self.plan.refuse(name, ELSEWHERE)
        self._replay = self._compile() if wrong else self._replay
        if wrong and self._trusted:
            raise ValueError(f"its load puts {', '.join(wrong[:5])} elsewhere than earlier syncs did. {REMEDY}")
        if proven and self.plan.planned and not self.plan.refused and not self._trusted:
            self._trusted = self._settled = True
            self._say()
        self._start()

    def _start(self) -> None:
        assert self._replay is not None
        names = self._replay.leftovers if self._trusted else self._names
        self._assembler = Assembler(names, self._model.fused_pairs)
        self._sums.zero_()
        self._comparison = None
        self.replayed = (self._replay.tensors, self._replay.nbytes) if self._trusted else (0, 0)
        if self._trusted:
            self._replay.fill()

    def _recorded(self, copy_plan: bool) -> CopyPlan:
        """The plan of the present layout. Without copy plans, and of a model that cannot be planned, the load is
        recorded once all the same, to know what it leaves out."""
        if self.uses.known and not self.plan.planned:
            return self.plan
        plan = make_plan(self._model, self._sources, self.device)
        self.recording, plan.recording = plan.recording, None
        wider = {} if self.recording is None else self.recording.wider(self._sources)
        self.uses.recorded(plan.uses, wider)
        return plan if copy_plan else CopyPlan(uses=plan.uses)

    @property
    def watched(self) -> bool:
        """Whether the writes of this sync are to be seen: of the model's whole load, and of the first that it makes of
        leftovers alone, which a model may treat otherwise."""
        leftovers = self._replay is not None and bool(self._replay.leftovers)
        return not self._settled or (self._trusted and not self._replay_watched and leftovers)

    def sums(self) -> bytes:
        """The hashes of what was read, as little-endian int64; empty without hashing. Waits for the device."""
        return bytes(self._sums.cpu().numpy().astype("<i8").tobytes()) if self._hashed else b""

    def readings(self, always: bool) -> Readings | None:
        """What ``sums`` are of; ``None`` when that is what ``told`` has noted, unless ``always``."""
        readings = self._replay.readings if self._replay is not None and self._hashed else None
        return readings if always or readings != self._told else None

    def told(self, readings: Readings | None) -> None:
        """The trainer knows these; ``None``: nothing new."""
        self._told = self._told if readings is None else readings

    def traffic(self, near: frozenset[int], beside: bool) -> tuple[int, int]:
        """Bytes that this sync reads on its own device, and elsewhere; see ``Replay.traffic``."""
        assert self._replay is not None, "begin() comes first"
        return self._replay.traffic(near, beside, self._trusted)

    @property
    def reads_in_place(self) -> str:
        """Why the next sync may not read parameters where they lie; empty when it may."""
        if not self._trusted or self._replay is None:
            return "the plan of this layout is not proven"
        kernel = self._copier is None or self._copier.kernel
        return obstacle(self._replay.works, self.device, kernel)

    def load_in_place(self, lives: tuple[Live, ...], place: int, regions: Regions) -> None:
        """Loads everything from where the trainer ranks hold it; copies may still run when it returns.

        Args:
            lives: of all ranks of the group.
            place: which of them is beside.
            regions: has mapped them.

        Raises:
            ValueError: they do not hold what the manifest says.
        """
        replay = self._replay
        assert replay is not None and self._copier is not None and self._trusted, "reads_in_place comes first"
        self.direct.of(replay.works, lives, place, regions, self._copier).run(self._sums, self._hashed)

    def _prepare(self, plan: CopyPlan) -> None:
        for name in scattered([entry for bucket in self.manifest.buckets for entry in bucket], plan.planned):
            plan.refuse(name, "arrives in many small pieces")
        self.plan = plan
        self._copier = Copier(self.device, known_tensors(self._model.module))
        self._replay = self._compile()
        if plan.refused:
            self._say()

    def _compile(self) -> Replay:
        assert self._copier is not None, "begin() comes first"
        self._replay_watched = False  # other leftovers than before
        return Replay(self.plan, self.manifest, self._copier, self._whole)

    def load(self, index: int, slots: Sequence[torch.Tensor]) -> None:
        """Loads one bucket; copies may still run when it returns.

        Args:
            index: number of the bucket.
            slots: the one it is in, or one per segment; uint8.
        """
        replay = self._replay
        assert replay is not None, "begin() comes first"
        memory = BucketMemory(slots, self.manifest.segments[index], self.manifest.worlds[index])
        if self._trusted:
            replay.run(index, memory, self._sums, self._hashed)
            entries = replay.works[index].leftovers
        else:
            if self._hashed:
                replay.read(index, memory, self._sums)
            if self.plan.planned and self._copier is not None:
                self._comparison = self._comparison or Comparison(replay, self._copier, self.device)
                self._comparison.note(index, memory)
            entries = self.manifest.buckets[index]
        if entries:
            self.uses.load(self._model.load_weights, self._assembler.tensors(memory, entries))

    def finish(self, ledger: Ledger | None) -> None:
        """Ends the sync: derives what the model derives, trusts the plan if it proved right.

        Args:
            ledger: of a watched sync; to be told which bytes were written in other ways.

        Raises:
            ValueError: a tensor is incomplete.
        """
        self._assembler.finish()
        if self._trusted:
            with ledger or nullcontext():
                if self.plan.derives:
                    self._model.derive_after_load()
            if ledger is not None:
                ledger.note_bytes(self.plan.target_runs())
        elif self._comparison is not None:
            self._compare(self._comparison, ledger)
            self._comparison = None
        self._settled = True

    def accepted(self) -> None:
        """What the ledger saw of this sync is right."""
        self._replay_watched = self._replay_watched or self.replayed[0] > 0

    def _compare(self, comparison: Comparison, ledger: Ledger | None) -> None:
        plan, changed = self.plan, comparison.refuse_wrong(self.plan, self._names)
        if changed or not plan.planned:
            self._replay = self._compile()
        if ledger is not None and ledger.coverage().missing:
            ledger.note_bytes(plan.target_runs())
        self._trusted = bool(plan.planned)
        if changed or not plan.refused:
            self._say()

    def _say(self) -> None:
        how = "the kernel" if self._copier is not None and self._copier.kernel else "plain copies"
        for line in self.plan.lines_for_log(len(self._names), how):
            say(line)
