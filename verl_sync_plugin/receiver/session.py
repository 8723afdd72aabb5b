"""One scheduler rank's side of the protocol (see ``transport/protocol.py``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.unpacker import Unpacker
from verl_sync_plugin.transport.channel import Channel, ChannelTimeoutError
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
            running = _Running(channel)
            while isinstance(message := running.receive(wait), Load):
                memory = slot_of(self._staging, message.slot, hello.staging.slot_bytes)
                with running.loading(message.bucket, memory.is_cuda):
                    unpacker.load(message.bucket, memory)
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


class _Running:
    """Loads whose copies still run. The sender may overwrite a slot as soon as it hears ``Loaded``, so that is said
    only after the copies have completed; meanwhile the next load is started, so that the device never waits for us."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._started: deque[tuple[int, float, torch.cuda.Event]] = deque()
        self._idle_since = time.perf_counter()

    @contextmanager
    def loading(self, bucket: int, is_cuda: bool) -> Iterator[None]:
        """Around the start of one bucket's copies, on the current stream."""
        started = time.perf_counter()
        yield
        if is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._started.append((bucket, started, event))
        else:
            self._say(bucket, started)

    def receive(self, timeout: float) -> object:
        """The next word of the sender; completed loads are reported while there is none.

        Raises:
            ChannelTimeoutError: the copies of a load do not end, or the sender is silent.
        """
        deadline = time.monotonic() + timeout
        while self._started and not self._channel.has_word():
            if self._started[0][2].query():
                self._say(*self._started.popleft()[:2])
            elif time.monotonic() > deadline:
                raise ChannelTimeoutError(f"the copies of a bucket did not complete within {timeout:g} s")
        return self._channel.receive(timeout)

    def _say(self, bucket: int, started: float) -> None:
        now = time.perf_counter()
        seconds, self._idle_since = now - max(started, self._idle_since), now
        self._channel.send(Loaded(bucket, seconds))


def _expect(kind: type[T], message: object) -> T:
    if not isinstance(message, kind):
        raise ValueError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
    return message
