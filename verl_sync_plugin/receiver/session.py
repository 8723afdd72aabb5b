# SPDX-License-Identifier: Apache-2.0
"""One engine rank's side of the protocol (see ``transport/protocol.py``)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TypeVar

import torch

from verl_sync_plugin.receiver.activations import Activations
from verl_sync_plugin.receiver.copy_plan import REMEDY
from verl_sync_plugin.receiver.engine_model import EngineModel
from verl_sync_plugin.receiver.homes import beside, near, segments, spread
from verl_sync_plugin.receiver.layout_key import Layout, LayoutKey
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.load_cache import LoadCache
from verl_sync_plugin.receiver.proof import DestinationProof, refuse_rearranged
from verl_sync_plugin.receiver.running import Running
from verl_sync_plugin.receiver.unpacker import Unpacker
from verl_sync_plugin.transport.channel import Channel, describe
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.memory.regions import Regions, decline_staging, open_peer_staging, open_staging, slot_of
from verl_sync_plugin.transport.protocol import (
    Commit,
    Committed,
    Coverage,
    Hello,
    Load,
    LoadRequest,
    Manifest,
    Ready,
    Whereabouts,
)

T = TypeVar("T")


class ReceiverSession:
    """Lives as long as its model; keeps the manifest and what was learned from it, the proof of coverage and, unless it
    is told to let go of it, the opened staging memory between syncs.

    Holds no reference to the trainer's tensors; the staging memory it maps belongs to the trainer.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._key = LayoutKey(model)
        self._layout: Layout = ()  # at the beginning of the sync under way
        self._digest = ""
        self._unpacker: Unpacker | None = None
        self._proof: DestinationProof | None = None
        self._stagings: dict[str, torch.Tensor] = {}
        self._coverage: dict[str, Coverage] = {}
        self._regions = Regions()
        self._activations = Activations()
        self._load_cache = LoadCache()
        self._lives: tuple[Live, ...] = ()
        self._plain: object = None  # shapes and strides for which ``refuse_rearranged`` has passed
        self._judged: object = None  # the layout that had them
        self._maps = True  # trainer ranks' allocations, as far as is known

    def run(self, channel: Channel, request: LoadRequest) -> None:
        """Receives one sync.

        Raises:
            ChannelClosedError: the trainer ended the sync.
            ValueError: protocol or manifest violated.
            Exception: whatever the model's ``load_weights`` raises.
        """
        wait = request.timeout_seconds
        self._layout = self._key.now()  # while the trainer ranks make ready to greet
        hello = _expect(Hello, channel.receive(request.greeting_seconds))
        self._load_cache.begin()
        if hello.live:
            self._run_in_place(hello, channel, wait)
        else:
            self._run_staged(hello, channel, wait)

    def _run_staged(self, hello: Hello, channel: Channel, wait: float) -> None:
        self._forget_lives()
        if not self._open(hello, channel):
            return
        # This engine rank's own, also of memory that lies elsewhere
        device = self._stagings[hello.stagings[hello.place].key].device
        unpacker = self._unpacker_of(hello, channel, device, wait)
        self._begin(unpacker, hello)
        if hello.tell_use:
            channel.send(unpacker.uses.use(loaded=False))
        # What a plan covers cannot change while names, shapes and dtypes stay
        ledger = None if hello.digest in self._coverage and not unpacker.watched else Ledger(self._model.module)
        running = Running(channel, device)
        message = running.receive(wait)
        self._prepare_proof(hello, unpacker)  # not before: what the model leaves out is refused before it is touched
        with ledger or nullcontext(), unpacker.uses.watching():
            while isinstance(message, Load):
                with running.loading(message.bucket):
                    unpacker.load(message.bucket, self._parts(hello, unpacker, message))
                message = running.receive(wait)
        self._commit(_expect(Commit, message), hello, channel, ledger)

    def _parts(self, hello: Hello, unpacker: Unpacker, load: Load) -> list[torch.Tensor]:
        """Where a bucket lies: the slot it is in, or one part per segment."""
        memories = (self._stagings[export.key] for export in hello.stagings)
        slots = [slot_of(memory, load.slot, hello.stagings[0].slot_bytes) for memory in memories]
        nbytes = spread(unpacker.manifest, load.bucket)
        return segments(hello, slots, nbytes) if nbytes else [slots[hello.place]]

    def _run_in_place(self, hello: Hello, channel: Channel, wait: float) -> None:
        """The trainer ranks keep their parameters as they are until all engine ranks have said ``Loaded``."""
        unpacker = self._meet_in_place(hello, channel, wait)
        if unpacker is None:
            return
        running = Running(channel, unpacker.device)
        load = _expect(Load, running.receive(wait))
        try:
            self._prepare_proof(hello, unpacker)
            with running.loading(load.bucket):
                unpacker.load_in_place(self._lives, hello.place, self._regions)
        except BaseException:
            _wait_for(unpacker.device)  # the trainer goes on when it hears of this
            raise
        message = _expect(Commit, running.receive(wait))
        # Only now: until the trainer has heard ``Committed``, it may come back to what these map
        self._stagings = {}
        self._commit(message, hello, channel, None)

    def _meet_in_place(self, hello: Hello, channel: Channel, wait: float) -> Unpacker | None:
        """Ready to read in place, or ``None``, and then the trainer knows why not."""
        unpacker = self._unpacker if hello.digest == self._digest and hello.digest in self._coverage else None
        obstacle = "the engine does not know the plan"
        if unpacker is not None:
            self._begin(unpacker, hello)
            obstacle = unpacker.reads_in_place
        known = tuple(live.key for live in self._lives) == hello.live
        channel.send(Ready(unreachable=obstacle, needs_live=not known))
        if obstacle or known:
            return None if obstacle else unpacker
        self._lives = ()
        lives = _expect(Whereabouts, channel.receive(wait)).lives
        try:
            self._regions.map(region for live in lives for region in live.regions)
        except (RuntimeError, OSError) as error:
            self._maps = False
            self._regions.map(())  # what could be mapped would keep the trainer from freeing it
            channel.send(Ready(unreachable=f"{type(error).__name__}: {error}"))
            return None
        self._lives = lives
        channel.send(Ready())
        return unpacker

    def _forget_lives(self) -> None:
        """Unmaps parameters: the trainer may no longer have them there, and could not free what is mapped here."""
        if self._lives:
            self._lives = ()
            if self._unpacker is not None:
                self._unpacker.direct.forget()
            self._regions.map(())

    def _commit(self, commit: Commit, hello: Hello, channel: Channel, ledger: Ledger | None) -> None:
        unpacker = self._unpacker
        assert unpacker is not None, "loaded by it"
        if commit.unmap:  # also where what follows fails: the trainer gives it back in any case
            self._stagings = {}
        # Of this sync: what the model's own load proves wrong is taken out of the plan at its end
        did = (*unpacker.replayed, *unpacker.traffic(near(hello), beside(hello)))
        sums, readings = unpacker.sums(), unpacker.readings(always=commit.tell)
        unpacker.finish(ledger)
        if ledger is not None:
            self._note_coverage(hello.digest, ledger.coverage())
            unpacker.accepted()
        self._refuse_rearranged(unpacker)
        _wait_for(unpacker.device)  # what the model derived; its forward may use another stream
        self._load_cache.give_back()
        obstacle = unpacker.reads_in_place or ("" if self._maps else "an engine rank could not map them")
        activations = self._activations.take()
        used = unpacker.uses.news()
        channel.send(Committed(self._coverage[hello.digest], *did, sums, readings, obstacle, activations, used))
        unpacker.told(readings)
        if hello.prove and self._proof is not None:
            proven = self._proof.proven(always=commit.tell)
            channel.send(proven)
            self._proof.told(proven)

    def _refuse_rearranged(self, unpacker: Unpacker) -> None:
        """Once for parameters of these shapes and strides; a load that moves them makes no others."""
        if self._judged is unpacker.layout or not isinstance(unpacker.layout, tuple):
            return
        token, *places = unpacker.layout
        plain = (token, *(place[1:] for place in places))
        if plain != self._plain:
            refuse_rearranged(self._model, unpacker.device)
        self._plain, self._judged = plain, unpacker.layout

    def _begin(self, unpacker: Unpacker, hello: Hello) -> None:
        unpacker.begin(self._layout, hello.copy_plan, hello.hashed, hello.whole)
        if self._proof is not None:
            self._proof.begin(unpacker.layout)

    def _prepare_proof(self, hello: Hello, unpacker: Unpacker) -> None:
        """Once per layout, where what lies in the parameters is to be told: they are loaded with marks first, which
        prove a new copy plan, too."""
        if hello.prove:
            if self._proof is None:
                self._proof = DestinationProof(self._model, unpacker.manifest, unpacker.device)
            self._proof.prepare(unpacker.recording)
            unpacker.trust(self._proof.judge)
        unpacker.recording = None  # it refers to the parameters of now

    def _note_coverage(self, digest: str, found: Coverage) -> None:
        known = self._coverage.get(digest)
        if known is not None:
            before = {name for name, *_ in known.missing}
            if lost := [name for name, *_ in found.missing if name not in before]:
                raise ValueError(
                    f"given only what is not replayed, {self._model.name} no longer writes "
                    f"{', '.join(lost[:5])}. {REMEDY}"
                )
        self._coverage[digest] = found

    def _open(self, hello: Hello, channel: Channel) -> bool:
        """Maps the staging memory of every trainer rank that is read here; False when a peer's cannot be opened, and
        then the trainer knows why not."""
        keys = [export.key for export in hello.stagings]
        self._stagings = {key: held for key, held in self._stagings.items() if key in keys}  # unmap before mapping
        own = hello.stagings[hello.place]
        if beside(hello) and own.key not in self._stagings:
            self._stagings[own.key] = open_staging(own)
        device = self._stagings[own.key].device if beside(hello) else next(self._model.module.parameters()).device
        for export in hello.stagings:
            if export.key in self._stagings:
                continue
            try:
                self._stagings[export.key] = open_peer_staging(export, device)
            except (RuntimeError, OSError) as error:
                for unopened in (each for each in hello.stagings if each.key not in self._stagings):
                    decline_staging(unopened)
                channel.send(Ready(needs_plan=False, unreachable=f"{type(error).__name__}: {error}"))
                return False
        return True

    def _unpacker_of(self, hello: Hello, channel: Channel, device: torch.device, wait: float) -> Unpacker:
        known = self._unpacker is not None and hello.digest == self._digest
        channel.send(Ready(needs_plan=not known))
        if self._unpacker is None or not known:
            manifest = _expect(Manifest, channel.receive(wait))
            self._unpacker, self._digest = Unpacker(self._model, manifest, device), hello.digest
            self._proof = None
        return self._unpacker


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _expect(kind: type[T], message: object) -> T:
    if not isinstance(message, kind):
        raise ValueError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
    return message
