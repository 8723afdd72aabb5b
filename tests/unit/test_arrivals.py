# SPDX-License-Identifier: Apache-2.0
"""Who connects to a trainer rank: whatever else knocks, its engine rank is met, and in time."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from verl_sync_plugin.sync import arrivals
from verl_sync_plugin.sync.arrivals import JOIN_BYTES, Arrivals
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError
from verl_sync_plugin.transport.listener import Listener, connect
from verl_sync_plugin.transport.protocol import Failed, Join, Load

WAIT = 20.0
BOUND = 1.0

JOIN = struct.pack("!IB", 0x30, 0)
HOSTILE = {
    "silent": b"",
    "half a header": b"\0\0",
    "half a message": JOIN + b"\x81",
    "2 GB header": struct.pack("!I", (1 << 31) - 1),
    "more than a Join": struct.pack("!I", JOIN_BYTES + 1) + b"\0" * JOIN_BYTES,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a pickle": struct.pack("!I", 6) + b"cos\nx.",
    "another message": struct.pack("!IB", 0x12, 6) + b"\x82\xa6bucket\x01\xa4slot\x01",
}


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener(WAIT)
    yield listening
    listening.close()


def knock(listener: Listener, data: bytes) -> socket.socket:
    bare = socket.socket(socket.AF_UNIX)
    bare.settimeout(WAIT)
    bare.connect("\0" + listener.address[1:])
    bare.sendall(data)
    return bare


def joined(listener: Listener, sync_id: str) -> Channel:
    channel = connect(listener.address, WAIT, WAIT)
    channel.send(Join(sync_id))
    return channel


def is_closed(channel: Channel) -> bool:
    try:
        channel.receive(WAIT)
    except ChannelClosedError:
        return True
    return False


FLOOD = """
import contextlib, itertools, socket, sys
name, hostile = "\\0" + sys.argv[1][1:], [bytes.fromhex(data) for data in sys.argv[2].split(",")]
held = []
for number, data in enumerate(itertools.cycle(hostile)):
    bare = socket.socket(socket.AF_UNIX)
    bare.setblocking(False)  # the queue is full
    held.append(bare)
    with contextlib.suppress(OSError):
        bare.connect(name)
        bare.sendall(data)
    if number % 3 == 0:
        held.pop().close()
    if len(held) > 300:
        held.pop(0).close()
    if number == 300:
        print("flooding", flush=True)
"""


@contextlib.contextmanager
def flood(listener: Listener) -> Iterator[None]:
    """As many connections as a process can make, of every hostile kind; some stay open, some are gone at once."""
    hostile = ",".join(data.hex() for data in HOSTILE.values())
    command = [sys.executable, "-c", FLOOD, listener.address, hostile]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "flooding\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_connection_costs_a_line(
    data: bytes, listener: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "JOIN_SECONDS", 0.3)
    held = [knock(listener, data) for _ in range(5)]
    meeting, before = Arrivals(listener), time.monotonic()
    engine = joined(listener, "1")
    met = meeting.take("1", WAIT)
    assert met is not None and time.monotonic() - before < 0.2, "nobody is waited for who is not the engine rank"
    met.send(Load(1, 2))
    assert engine.receive(WAIT) == Load(1, 2)
    assert meeting.take("2", 0.6) is None
    said = capsys.readouterr().out
    assert said.count("a connection without a sync was dropped") == 5, said
    for bare in held:
        with contextlib.suppress(ConnectionResetError):
            assert bare.recv(1) == b"", "hung up on"


def test_who_has_joined_may_say_more(listener: Listener) -> None:
    engine = joined(listener, "1")
    met = Arrivals(listener).take("1", WAIT)
    assert met is not None
    long = Failed("x" * (10 * JOIN_BYTES))
    engine.send(long)
    assert met.receive(WAIT) == long


def test_an_engine_rank_that_speaks_late_is_met(listener: Listener) -> None:
    engine = connect(listener.address, WAIT, WAIT)
    timer = threading.Timer(0.5, engine.send, (Join("1"),))
    timer.start()
    assert Arrivals(listener).take("1", WAIT) is not None
    timer.join()


def test_the_wait_keeps_its_bound_under_a_flood(listener: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Arrivals(listener)
    with flood(listener):
        before = time.monotonic()
        assert meeting.take("1", BOUND) is None
        assert BOUND * 0.9 < time.monotonic() - before < BOUND + 1  # a timer may end a little early
    assert capsys.readouterr().out.count("dropped") > 50


def test_an_engine_rank_is_met_in_a_flood(listener: Listener) -> None:
    meeting = Arrivals(listener)
    with flood(listener):
        engine: list[Channel] = []
        thread = threading.Thread(target=lambda: engine.append(joined(listener, "1")))
        thread.start()
        assert meeting.take("1", WAIT) is not None
        thread.join()


def test_stop_returns_at_once_in_a_flood(listener: Listener) -> None:
    meeting = Arrivals(listener)
    with flood(listener):
        meeting.turn_away("1")
        time.sleep(0.5)
        before = time.monotonic()
        meeting.stop()
        assert time.monotonic() - before < 1


@pytest.mark.parametrize("act", [lambda channel: None, lambda channel: channel.close()], ids=["open", "gone"])
def test_engine_ranks_of_other_syncs_are_turned_away(listener: Listener, act: Callable[[Channel], None]) -> None:
    meeting = Arrivals(listener)
    late = joined(listener, "1")
    act(late)
    assert meeting.take("2", 0.1) is None and is_closed(late)
    meeting.turn_away("2")
    assert is_closed(joined(listener, "2"))
    early = joined(listener, "3")
    time.sleep(0.2)
    meeting.stop()
    met = meeting.take("3", 0)
    assert met is not None
    met.send(Load(0, 0))
    assert early.receive(WAIT) == Load(0, 0)
