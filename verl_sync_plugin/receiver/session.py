"""One scheduler rank's side of the protocol (see ``transport/protocol.py``)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from verl_sync_plugin.bucket import Entry
from verl_sync_plugin.receiver.assembly import Assembler
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.protocol import (
    Commit,
    Committed,
    Coverage,
    Hello,
    Load,
    Loaded,
    LoadRequest,
    Manifest,
    Ready,
    describe,
)
from verl_sync_plugin.transport.staging import open_staging, slot_of

T = TypeVar("T")


class ReceiverSession:
    """Lives as long as its model; keeps the plan, the opened staging memory and the proof of coverage between syncs.

    Holds no reference to the trainer's tensors; the staging memory it maps belongs to the trainer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model  # an SGLang model: a torch module with load_weights
        self._digest = ""
        self._manifest: tuple[tuple[Entry, ...], ...] = ()
        self._staging_key = ""
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._coverage: dict[str, Coverage] = {}

    def run(self, channel: Channel, request: LoadRequest) -> None:
        """Receives one sync.

        Raises:
            ChannelClosedError: the trainer ended the sync.
            ValueError: protocol or manifest violated.
            Exception: whatever the model's ``load_weights`` raises.
        """
        wait = request.timeout_seconds
        hello = _expect(Hello, channel.receive(wait))
        self._open(hello, channel, wait)
        assembler = Assembler(frozenset(entry.name for bucket in self._manifest for entry in bucket))
        # One sync per plan is recorded; what a plan covers cannot change while names, shapes and dtypes stay
        ledger = None if hello.digest in self._coverage else Ledger(self._model)
        with ledger or nullcontext():
            while isinstance(message := channel.receive(wait), Load):
                started = time.perf_counter()
                self._load(message, hello.staging.slot_bytes, assembler)
                channel.send(Loaded(message.bucket, time.perf_counter() - started))
        _expect(Commit, message)
        assembler.finish()
        if ledger is not None:
            self._coverage[hello.digest] = ledger.coverage()
        channel.send(Committed(self._coverage[hello.digest]))

    def _open(self, hello: Hello, channel: Channel, wait: float) -> None:
        if hello.staging.key != self._staging_key:
            self._staging = torch.empty(0, dtype=torch.uint8)  # unmap the old before mapping the new
            self._staging = open_staging(hello.staging)
            self._staging_key = hello.staging.key
        known = hello.digest == self._digest
        channel.send(Ready(needs_plan=not known))
        if not known:
            self._manifest = _expect(Manifest, channel.receive(wait)).buckets
            self._digest = hello.digest

    def _load(self, message: Load, slot_bytes: int, assembler: Assembler) -> None:
        memory = slot_of(self._staging, message.slot, slot_bytes)
        self._model.load_weights(assembler.tensors(memory, self._manifest[message.bucket]))
        if memory.is_cuda:
            # The sender may overwrite the slot as soon as it hears Loaded: the copies must have completed
            torch.cuda.current_stream().synchronize()


def _expect(kind: type[T], message: object) -> T:
    if not isinstance(message, kind):
        raise ValueError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
    return message
