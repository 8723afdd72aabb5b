"""The control channel between two real processes."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from verl_sync_plugin.transport.channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Listener,
    connect,
)

WAIT = 20.0


def echo(address: str) -> None:
    """The other process: returns what it hears, doubled, until it hears ``None``."""
    channel = connect(address, WAIT)
    while (message := channel.receive(WAIT)) is not None:
        channel.send((message, message))
    channel.close()


def greet_and_die(address: str) -> None:
    """The other process: says one word and is gone without closing anything."""
    connect(address, WAIT).send("hello")
    os._exit(1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener()
    yield listening
    listening.close()


def started(target: Callable[[str], None], listener: Listener) -> tuple[BaseProcess, Channel]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(listener.address,), daemon=True)
    process.start()
    channel = listener.accept(WAIT)
    assert channel is not None
    return process, channel


def test_messages_go_both_ways(listener: Listener) -> None:
    process, channel = started(echo, listener)
    messages: list[Any] = ["word", {"a": (1, 2.5)}, b"x" * (1 << 20)]
    for message in messages:
        channel.send(message)
        assert channel.receive(WAIT) == (message, message)
    channel.send(None)
    process.join(WAIT)
    assert process.exitcode == 0


def test_silence_ends_in_a_timeout(listener: Listener) -> None:
    process, channel = started(echo, listener)
    before = time.monotonic()
    with pytest.raises(ChannelTimeoutError, match=r"within 0\.2 s"):
        channel.receive(0.2)
    assert 0.2 <= time.monotonic() - before < 2
    channel.send("still usable")
    assert channel.receive(WAIT) == ("still usable", "still usable")
    channel.send(None)
    process.join(WAIT)


def test_dead_peer_is_noticed(listener: Listener) -> None:
    process, channel = started(greet_and_die, listener)
    process.join(WAIT)
    assert channel.receive(WAIT) == "hello"
    before = time.monotonic()
    with pytest.raises(ChannelClosedError, match="gone"):
        channel.receive(WAIT)
    with pytest.raises(ChannelClosedError, match="gone"):
        for _ in range(100):
            channel.send(b"x" * 4096)
    assert time.monotonic() - before < 2


def test_own_close_is_a_closed_channel(listener: Listener) -> None:
    client = connect(listener.address, WAIT)
    client.close()
    with pytest.raises(ChannelClosedError):
        client.send("x")
    with pytest.raises(ChannelClosedError):
        client.receive(0.1)


def test_accept_returns_none_when_nobody_comes(listener: Listener) -> None:
    assert listener.accept(0.05) is None


def test_only_the_owner_can_enter(listener: Listener) -> None:
    directory = Path(listener.address).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(os.stat(listener.address).st_mode)


def test_close_leaves_nothing() -> None:
    listening = Listener()
    directory = Path(listening.address).parent
    assert directory.exists()
    listening.close()
    listening.close()
    assert not directory.exists()


def test_forgotten_listener_leaves_nothing() -> None:
    listening = Listener()
    directory = Path(listening.address).parent
    del listening
    assert not directory.exists()


def test_connect_without_listener_times_out(tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ChannelTimeoutError, match=str(tmp_path)):
        connect(str(tmp_path / "channel"), 0.2)
    assert 0.2 <= time.monotonic() - before < 2


def test_connect_waits_for_a_late_listener(tmp_path: Path) -> None:
    """The engine may be invited a moment before its trainer rank listens."""
    listening = Listener()
    address = str(tmp_path / "late")
    timer = threading.Timer(0.2, os.symlink, (listening.address, address))
    timer.start()
    connect(address, WAIT).send("late")
    channel = listening.accept(WAIT)
    assert channel is not None
    assert channel.receive(WAIT) == "late"
    listening.close()


def test_connect_to_a_full_queue_times_out(listener: Listener) -> None:
    """A trainer rank that never accepts must not block the engine beyond the timeout."""
    outcome: list[BaseException] = []

    def fill() -> None:
        try:
            held = [connect(listener.address, 0.2) for _ in range(16)]
            held.clear()
        except ChannelTimeoutError as error:
            outcome.append(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    thread.join(5)
    assert len(outcome) == 1, "connect() ignored its timeout"
