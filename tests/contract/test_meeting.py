# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks meet their engine ranks, whoever else is in the queue, in real process groups."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.sync.endpoint import LoadOutcome, MeetingPoint, PendingLoad
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, connect
from verl_sync_plugin.transport.protocol import Load, LoadRequest, Ready

WAIT = 5.0


class Loading(PendingLoad):
    def __init__(self) -> None:
        """Without a call of a server's."""

    def finished(self) -> bool:
        return False

    async def outcome(self, timeout: float) -> LoadOutcome:
        return LoadOutcome()


class Comer(Engine):
    """An engine whose ranks come when they are asked, the last one after some seconds."""

    def __init__(self, late: float = 0.0) -> None:
        super().__init__()
        self.late = late
        self.came: list[Channel] = []
        self.flushes: list[int] = []
        self.coming: list[threading.Thread] = []

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        self.coming = [threading.Thread(target=self._come, args=(request,), daemon=True)]
        self.coming[0].start()
        return Loading()

    def _come(self, request: LoadRequest) -> None:
        for address in request.addresses:
            if address == request.addresses[-1]:
                time.sleep(self.late)
            with contextlib.suppress(ChannelClosedError):  # refused: the sync was given up
                self.came.append(connect(address, WAIT, WAIT))

    def flush_behind_load(self) -> None:
        self.flushes.append(len(self.came))


def is_closed(channel: Channel) -> bool:
    try:
        channel.receive(WAIT)
    except ChannelClosedError:
        return True
    return False


def meeting_of(engine: Comer) -> MeetingPoint:
    sender = BucketSender(torch.device("cpu"), WAIT)
    return MeetingPoint(Agreement(WAIT), engine, sender, SyncConfig(timeout_seconds=WAIT))


def meet() -> tuple[bool, list[int], bool]:
    """True if the right engine rank was met, the flushes asked for, and True if who came early for the next is met."""
    engine = Comer(late=0.5)
    meeting = meeting_of(engine)
    meeting.begin("1")
    meeting.ask("2")
    asyncio.run(meeting.meet(Ready))
    while len(engine.came) < engine.leader * 2:
        time.sleep(0.01)
    for rank, channel in enumerate(engine.came):
        channel.send(Load(rank, 0))
    assert meeting._secrets is not None
    secret = meeting._secrets[dist.get_rank()]
    assert meeting._sender._channel is not None
    right = meeting._sender._channel.receive(WAIT)
    with pytest.raises(ChannelClosedError):
        connect(f"@verl-sync-{secret}-1", WAIT, WAIT)
    early = connect(f"@verl-sync-{secret}-2", WAIT, WAIT)
    meeting.begin("2")
    met = meeting._accept()
    assert met is not None
    met.send(Load(7, 7))
    found = right == Load(dist.get_rank(), 0), engine.flushes, early.receive(WAIT) == Load(7, 7)
    meeting.close()
    return found


def test_ranks_meet_in_their_own_sync_alone() -> None:
    for rank, (right, flushes, early) in enumerate(run_world(2, meet, timeout=60)):
        assert right and early
        assert len(flushes) == (rank == 0), "asked for once, by the leader, with all engine ranks in the load"


def give_up(asked: bool, late: float) -> tuple[float, list[bool], int]:
    """The seconds it took, which engine ranks that had come were hung up on, and how often the engine was told."""
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


def test_engine_ranks_of_a_sync_that_was_given_up_are_let_go_whenever_they_come() -> None:
    (leading, closed, abandoned), (following, *_) = run_world(2, give_up, True, 2.0, timeout=60)
    assert all(closed) and abandoned == 1
    assert max(leading, following) < 1, "nobody waits for them"
