"""One scheduler rank's side of the protocol (see ``transport/protocol.py``)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.unpacker import Unpacker
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
    """Lives as long as its model; keeps the manifest and what was learned from it, the opened staging memory and the
    proof of coverage between syncs.

    Holds no reference to the trainer's tensors; the staging memory it maps belongs to the trainer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model  # an SGLang model: a torch module with load_weights
        self._digest = ""
        self._unpacker: Unpacker | None = None
        self._staging_key = ""
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._coverage: dict[str, Coverage] = {}

    def run(self, channel: Channel, request: LoadRequest) -> None:
        """Receives one sync.

        Raises:
            ChannelClosedError: the trainer ended the sync.
            ValueError: protocol or manifest violated, or bytes changed on the way.
            Exception: whatever the model's ``load_weights`` raises.
        """
        wait = request.timeout_seconds
        hello = _expect(Hello, channel.receive(wait))
        unpacker = self._open(hello, channel, wait)
        unpacker.begin(hello.copy_plan, hello.hashed)
        # One sync per plan is recorded; what a plan covers cannot change while names, shapes and dtypes stay
        ledger = None if hello.digest in self._coverage and unpacker.settled else Ledger(self._model)
        with ledger or nullcontext():
            while isinstance(message := channel.receive(wait), Load):
                started = time.perf_counter()
                self._load(message, hello.staging.slot_bytes, unpacker)
                channel.send(Loaded(message.bucket, time.perf_counter() - started))
        unpacker.finish(_expect(Commit, message).sums, ledger)
        if ledger is not None:
            self._coverage[hello.digest] = ledger.coverage()
        channel.send(Committed(self._coverage[hello.digest], *unpacker.replayed))

    def _open(self, hello: Hello, channel: Channel, wait: float) -> Unpacker:
        if hello.staging.key != self._staging_key:
            self._staging = torch.empty(0, dtype=torch.uint8)  # unmap the old before mapping the new
            self._staging = open_staging(hello.staging)
            self._staging_key = hello.staging.key
        known = self._unpacker is not None and hello.digest == self._digest
        channel.send(Ready(needs_plan=not known))
        if self._unpacker is None or not known:
            manifest = _expect(Manifest, channel.receive(wait))
            self._unpacker, self._digest = Unpacker(self._model, manifest, self._staging.device), hello.digest
        return self._unpacker

    def _load(self, message: Load, slot_bytes: int, unpacker: Unpacker) -> None:
        memory = slot_of(self._staging, message.slot, slot_bytes)
        unpacker.load(message.bucket, memory)
        if memory.is_cuda:
            # The sender may overwrite the slot as soon as it hears Loaded: the copies must have completed
            torch.cuda.current_stream().synchronize()


def _expect(kind: type[T], message: object) -> T:
    if not isinstance(message, kind):
        raise ValueError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
    return message
