# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks meet their engine ranks, whoever else is in the queue, in real process groups."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sync.arrivals import POLL_SECONDS
from verl_sync_plugin.sync.connect import MeetingPoint
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError
from verl_sync_plugin.transport.listener import connect
from verl_sync_plugin.transport.protocol import Failed, Join, Load, LoadRequest

WAIT = 5.0


class Loading(PendingLoad):
    def __init__(self) -> None:
        self.over = False

    def finished(self) -> bool:
        return self.over

    async def outcome(self, timeout: float) -> LoadOutcome:
        if self.over:
            raise RuntimeError("injected: SGLang refused the update")
        return LoadOutcome()


class Comer(Engine):
    """An engine whose ranks come when they are asked, the last one after some seconds; or that refuses."""

    def __init__(self, comes: bool = True, late: float = 0.0) -> None:
        super().__init__()
        self.comes, self.late = comes, late
        self.came: list[Channel] = []
        self.flushes: list[int] = []
        self.coming: list[threading.Thread] = []

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        load = Loading()
        load.over = not self.comes
        self.coming = [threading.Thread(target=self._come, args=(request,), daemon=True)]
        if self.comes:
            self.coming[0].start()
        return load

    def _come(self, request: LoadRequest) -> None:
        for address in request.addresses:
            if address == request.addresses[-1]:
                time.sleep(self.late)
            channel = connect(address, WAIT, WAIT)
            self.came.append(channel)  # before the trainer rank can have met it, so that who has met all finds all here
            channel.send(Join(request.sync_id))

    def flush_behind_load(self) -> None:
        self.flushes.append(len(self.came))


def joined(address: str, sync_id: str) -> Channel:
    channel = connect(address, WAIT, WAIT)
    channel.send(Join(sync_id))
    return channel


def is_closed(channel: Channel) -> bool:
    try:
        channel.receive(WAIT)
    except ChannelClosedError:
        return True
    return False


def meeting_of(engine: Comer) -> MeetingPoint:
    sender = BucketSender(torch.device("cpu"), WAIT)
    return MeetingPoint(Agreement(WAIT), engine, sender, SyncConfig(timeout_seconds=WAIT))


def meet_among_leftovers() -> tuple[list[bool], float, bool, list[int]]:
    """Whether leftovers were closed, the seconds it took, whether the right one was met, and the flushes asked for."""
    engine = Comer(late=0.5)
    meeting = meeting_of(engine)
    late = joined(meeting._listener.address, "1")
    silent = connect(meeting._listener.address, WAIT, WAIT)
    silent.close()
    meeting.begin("2")
    started = time.monotonic()
    meeting.ask("2")
    asyncio.run(meeting.meet())
    seconds = time.monotonic() - started
    met = meeting._sender._channel
    assert met is not None
    for rank, channel in enumerate(engine.came):
        channel.send(Load(rank, 0))
    found = [is_closed(late)], seconds, met.receive(WAIT) == Load(dist.get_rank(), 0), engine.flushes
    meeting._sender.hang_up()
    return found


def test_leftovers_of_earlier_syncs_do_not_disturb() -> None:
    for rank, (closed, seconds, right, flushes) in enumerate(run_world(2, meet_among_leftovers, timeout=60)):
        assert closed == [True] and right and seconds < 3
        assert flushes == ([2] if rank == 0 else []), "asked for once, by the leader, with all engine ranks in the load"


def give_up(asked: bool, late: float) -> tuple[float, list[bool], int]:
    """The seconds it took, which engine ranks were turned away, and how often the engine was told."""
    engine = Comer(late=late)
    meeting = meeting_of(engine)
    meeting.begin("1")
    if asked:
        meeting.ask(None)
    dist.barrier()
    started = time.monotonic()
    asyncio.run(meeting.give_up("injected"))
    seconds = time.monotonic() - started
    if asked and engine.leader:
        engine.coming[0].join()
    closed = [is_closed(channel) for channel in engine.came]
    dist.barrier()
    return seconds, closed, len(engine.abandoned)


def test_given_up_engine_ranks_are_turned_away_whenever_they_come() -> None:
    (leading, closed, abandoned), (following, *_) = run_world(2, give_up, True, 4.0, timeout=60)
    assert closed == [True, True] and abandoned == 1
    assert max(leading, following) < 3, "nobody waits for them"


def test_given_up_before_it_was_asked_nobody_is_expected() -> None:
    for seconds, closed, _ in run_world(2, give_up, False, 0.0, timeout=60):
        assert seconds < 3 and not closed


def come_early() -> tuple[bool, bool]:
    """Whether the engine rank of a given-up sync was turned away, and the one that came early for the next was met."""
    engine = Comer()
    meeting = meeting_of(engine)
    for sync_id in ("1", "2"):
        meeting.begin(sync_id)
        meeting._expected = True  # as if asked for
        asyncio.run(meeting.give_up("injected"))
        meeting._arrivals.turn_away(sync_id)
    closed = is_closed(joined(meeting._listener.address, "1"))
    early = joined(meeting._listener.address, "3")  # another rank has begun the next sync
    early.send(Failed("early"))
    time.sleep(3 * POLL_SECONDS)
    engine.start_load = lambda *_: Loading()  # type: ignore[method-assign]
    meeting.begin("3")
    meeting.ask(None)
    asyncio.run(meeting.meet())
    met = meeting._sender._channel
    assert met is not None
    return closed, met.receive(WAIT) == Failed("early")


def test_who_comes_early_for_the_next_sync_is_met() -> None:
    assert run_world(2, come_early, timeout=60) == [(True, True)] * 2


def early_given_up() -> bool:
    """Whether an engine rank that came early is let go when its sync is given up before the ranks met."""
    meeting = meeting_of(Comer())
    meeting._arrivals.turn_away("1")
    early = joined(meeting._listener.address, "2")
    time.sleep(3 * POLL_SECONDS)
    meeting.begin("2")
    meeting._arrivals.stop()
    meeting._expected = True
    asyncio.run(meeting.give_up("injected"))
    return is_closed(early)


def test_who_came_early_is_let_go() -> None:
    assert run_world(1, early_given_up, timeout=60) == [True]


def refused(*how: Any) -> tuple[str, float]:
    """The error of meeting an engine, and the seconds until then."""
    meeting: Any = meeting_of(Comer(*how))
    meeting.begin("1")
    meeting.ask(None)
    started = time.monotonic()
    try:
        asyncio.run(meeting.meet())
    except SyncError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_an_engine_that_refuses_ends_the_wait_of_all() -> None:
    (text, _), (same, _) = run_world(2, refused, False, timeout=60)
    assert "rank 0: RuntimeError: injected: SGLang refused the update" in text and text == same
