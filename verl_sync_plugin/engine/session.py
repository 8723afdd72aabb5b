# SPDX-License-Identifier: Apache-2.0
"""One engine rank's side of the protocol (see ``transport/protocol.py``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.engine.load import ModelLoad, refuse_rearranged
from verl_sync_plugin.engine.model import EngineModel
from verl_sync_plugin.transport.channel import Channel, ChannelTimeoutError
from verl_sync_plugin.transport.memory import Location, Regions, Slots
from verl_sync_plugin.transport.protocol import (
    Commit,
    Committed,
    Hello,
    Load,
    Loaded,
    LoadRequest,
    Manifest,
    Ready,
    agreement_seconds,
)

LEAST_BYTES = 64 << 20  # of an allocator's cache; less is not worth the device's wait for the freeing
T = TypeVar("T")


class ReceiverSession:
    """Lives as long as its model; keeps the manifest and what was learned from it. Staging memory stays mapped until a
    commit says otherwise, or a sync in place ends.

    What it maps belongs to the trainer: staging memory, and allocations with parameters that it reads in place.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._digest = ""
        self._load: ModelLoad | None = None
        self._stagings: tuple[Slots, ...] = ()
        self._regions = Regions()
        self._least: int | None = None  # fewest bytes the allocator held at a sync
        self._locations: tuple[Location, ...] = ()
        self._maps = True  # False once parameters could not be mapped
        self._reserved = 0

    def run(self, channel: Channel, request: LoadRequest) -> None:
        """Receives one sync.

        Raises:
            ChannelClosedError, ChannelTimeoutError: the trainer ended the sync, or is silent.
            ValueError: protocol or manifest violated.
            Exception: whatever the model's ``load_weights`` raises.
        """
        wait = request.timeout_seconds
        if self._load is not None:  # while the trainer ranks make ready to greet
            self._load.note_layout()
        hello = _expect(Hello, channel.receive(agreement_seconds(wait)))
        self._reserved = _reserved_bytes()
        opened = (self._open_in_place if hello.location_keys else self._open_staged)(hello, channel, wait)
        if isinstance(opened, str):
            channel.send(Ready(refusal=opened))
            return
        channel.send(Ready(map=None if hello.map == opened.map.digest else opened.map))
        running = PendingLoads(channel, opened.device)
        message = running.receive(wait)
        while isinstance(message, Load):
            with running.loading(message.bucket):
                if hello.location_keys:  # trainer ranks keep their parameters until all engine ranks have answered
                    opened.load_in_place(self._locations, hello.place, self._regions)
                else:
                    opened.load(message.bucket, self._parts(hello, opened.manifest, message))
            message = running.receive(wait)
        commit = _expect(Commit, message)
        if hello.location_keys:
            # Only now: until the trainer has heard ``Committed``, it may come back to what these map
            self._map(locations=self._locations)
        self._commit(commit, hello, channel)

    def _open_staged(self, hello: Hello, channel: Channel, wait: float) -> ModelLoad | str:
        """Ready to read from slots, or the reason why not."""
        if refusal := self._refusal(hello.stagings):
            return refusal
        if self._load is None or hello.digest != self._digest:
            channel.send(Ready(needs_details=True))
            manifest = _expect(Hello, channel.receive(wait)).manifest
            if manifest is None:
                raise ValueError("weight-sync protocol: a plan without its manifest")
            device = next(self._model.module.parameters()).device
            self._load, self._digest = ModelLoad(self._model, manifest, device, self._load), hello.digest
        self._load.begin()
        return self._load

    def _open_in_place(self, hello: Hello, channel: Channel, wait: float) -> ModelLoad | str:
        """Ready to read in place, or the reason why not."""
        if self._load is None or hello.digest != self._digest:
            return "the engine does not know the plan"
        self._load.begin()
        if obstacle := self._load.obstacle:
            return obstacle
        if tuple(location.key for location in self._locations) != hello.location_keys:
            channel.send(Ready(needs_details=True))
            if refusal := self._refusal(self._stagings, _expect(Hello, channel.receive(wait)).locations):
                self._maps = False
                return refusal
        return self._load

    def _parts(self, hello: Hello, manifest: Manifest, message: Load) -> Sequence[torch.Tensor]:
        """The memory of a bucket: the slot it is in, or one slot per segment."""
        slots = [self._regions.slot(slots, message.slot) for slots in self._stagings]
        return slots if manifest.sharded and manifest.buckets[message.bucket].world > 1 else [slots[hello.place]]

    def _refusal(self, stagings: tuple[Slots, ...], locations: tuple[Location, ...] = ()) -> str:
        """Maps these; returns the reason why one of them cannot be mapped, if so."""
        try:
            self._map(stagings, locations)
        except (RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _map(self, stagings: tuple[Slots, ...] = (), locations: tuple[Location, ...] = ()) -> None:
        """Maps these and unmaps all else, of which the trainer could not free what is mapped here. Raises RuntimeError
        or OSError where one cannot be reached from here; then nothing is mapped."""
        if self._load is not None and not (locations and locations == self._locations):
            self._load.forget_locations()
        self._stagings, self._locations = (), ()
        try:
            self._regions.map([*(s.region for s in stagings), *(each for found in locations for each in found.regions)])
        except BaseException:
            self._regions.map(())
            raise
        self._stagings, self._locations = stagings, locations

    def _commit(self, commit: Commit, hello: Hello, channel: Channel) -> None:
        load = self._load
        assert load is not None, "loaded by it"
        try:
            sums = load.sums()
            load.finish()
        finally:
            if commit.unmap:  # the trainer gives it back in any case
                self._map(locations=self._locations)
        if load.is_new:
            refuse_rearranged(self._model, load.device)
            load.is_new = False
        if load.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # what the model derived; its forward may use another stream
        if _reserved_bytes() - self._reserved >= LEAST_BYTES:
            # The engine resumes its KV cache next, through an allocator of its own that cannot use what a first sync
            # leaves in this one: at a memory share of 0.97 of an H100 the KV cache of 7.6 B did not come back
            torch.cuda.empty_cache()
        obstacle = load.obstacle or ("" if self._maps else "an engine rank could not map them")
        activations = self._take_activations()  # without what the hashes take
        held = load.held() if hello.asks_hashes else None
        channel.send(Committed(load.replayed, sums, obstacle, activations, held))

    def _take_activations(self) -> int:
        """Bytes that the engine's allocator took since the last call, in addition to what it keeps; 0 at the first, and
        without a device.

        What the engine keeps (weights, KV cache, CUDA graphs) counts also while it is asleep, so the least count at any
        sync stands for it. Resets the allocator's peaks, which nobody else in the process may count on.
        """
        if not torch.cuda.is_available():
            return 0
        current, peak, least = _reserved_bytes(), _reserved_bytes("peak"), self._least
        torch.cuda.reset_peak_memory_stats()
        self._least = current if least is None else min(current, least)
        return 0 if least is None else peak - self._least


class PendingLoads:
    """Loads whose copies still run. The sender may overwrite a slot as soon as it hears ``Loaded``, so that is said
    only after the copies have completed; meanwhile the next load is started, so that the device never waits for us."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._cuda = device.type == "cuda"
        self._started: deque[tuple[int, float, torch.cuda.Event]] = deque()
        self._idle_since = time.perf_counter()

    @contextmanager
    def loading(self, bucket: int) -> Iterator[None]:
        """Around the start of one bucket's copies, on the current stream."""
        started = time.perf_counter()
        yield
        if self._cuda:
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
        while self._started and not self._channel.has_message():
            if self._started[0][2].query():
                self._say(*self._started.popleft()[:2])
            elif time.monotonic() > deadline:
                raise ChannelTimeoutError(
                    f"the copies of a bucket did not complete within {KEY_PREFIX}.timeout_seconds={timeout:g}"
                )
        return self._channel.receive(timeout)

    def _say(self, bucket: int, started: float) -> None:
        now = time.perf_counter()
        started, self._idle_since = max(started, self._idle_since), now
        self._channel.send(Loaded(bucket, now - started, started))


def _reserved_bytes(which: str = "current") -> int:  # ``memory_reserved`` sorts all of torch's counters for one
    return int(torch.cuda.memory_stats_as_nested_dict().get("reserved_bytes", {}).get("all", {}).get(which, 0))


def _expect(kind: type[T], message: object) -> T:
    if not isinstance(message, kind):
        raise ValueError(f"weight-sync protocol: expected {kind.__name__}, got {type(message).__name__}")
    return message
