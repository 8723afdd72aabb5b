"""Trainer ranks meet their engine ranks, whoever else is in the queue, in real process groups."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from verl_sync_plugin.config import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sharding_manager.agreement import Agreement
from verl_sync_plugin.sharding_manager.endpoint import LoadOutcome, PendingLoad
from verl_sync_plugin.sharding_manager.meeting import MeetingPoint
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, connect
from verl_sync_plugin.transport.protocol import Join, LoadRequest
from verl_sync_plugin.transport.sender import BucketSender

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
    """An engine whose ranks come as soon as they are asked."""

    def __init__(self, comes: bool = True) -> None:
        super().__init__()
        self.comes = comes
        self.came: list[Channel] = []
        self.flushes: list[int] = []

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        load = Loading()
        load.over = not self.comes
        if self.comes:
            self.came = [joined(address, request.sync_id) for address in request.addresses]
        return load

    def flush_behind_load(self) -> None:
        self.flushes.append(len(self.came))


def joined(address: str, sync_id: str) -> Channel:
    channel = connect(address, WAIT)
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
    engine = Comer()
    meeting = meeting_of(engine)
    late = joined(meeting._listener.address, "1")
    silent = connect(meeting._listener.address, WAIT)
    silent.close()
    meeting.begin("2", awake=True)
    started = time.monotonic()
    meeting.ask("2")
    asyncio.run(meeting.meet())
    seconds = time.monotonic() - started
    met = meeting._sender._channel
    assert met is not None
    if engine.leader:
        for rank, channel in enumerate(engine.came):
            channel.send(rank)
    found = [is_closed(late)], seconds, met.receive(WAIT) == dist.get_rank(), engine.flushes
    meeting._sender.hang_up()
    return found


def test_leftovers_of_earlier_syncs_do_not_disturb() -> None:
    for rank, (closed, seconds, right, flushes) in enumerate(run_world(2, meet_among_leftovers, timeout=60)):
        assert closed == [True] and right and seconds < 3
        assert flushes == ([2] if rank == 0 else []), "asked for once, by the leader, with all engine ranks there"


def give_up(asked: bool) -> tuple[float, list[bool], int]:
    """The seconds it took, which engine ranks were turned away, and how many are still expected."""
    engine = Comer()
    meeting = meeting_of(engine)
    meeting.begin("1", awake=asked)
    if asked:
        meeting.ask(None)
    dist.barrier()
    started = time.monotonic()
    asyncio.run(meeting.give_up("injected"))
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds, [is_closed(channel) for channel in engine.came], len(engine.abandoned)


def test_given_up_an_engine_rank_on_its_way_is_turned_away() -> None:
    (leading, closed, abandoned), (following, *_) = run_world(2, give_up, True, timeout=60)
    assert closed == [True, True] and abandoned == 1
    assert max(leading, following) < 2


def test_given_up_before_it_was_asked_nobody_waits() -> None:
    for seconds, closed, _ in run_world(2, give_up, False, timeout=60):
        assert seconds < 1 and not closed


def refused() -> str:
    meeting: Any = meeting_of(Comer(comes=False))
    meeting.begin("1", awake=True)
    meeting.ask(None)
    try:
        asyncio.run(meeting.meet())
    except SyncError as error:
        return str(error)
    return ""


def test_an_engine_that_refuses_ends_the_wait_of_all() -> None:
    (text,) = set(run_world(2, refused, timeout=60))
    assert "rank 0: RuntimeError: injected: SGLang refused the update" in text
