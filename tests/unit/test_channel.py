# SPDX-License-Identifier: Apache-2.0
"""The control channel between two real processes: what arrives, and that no wait is without a bound."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from manifests import manifest

from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError
from verl_sync_plugin.transport.codec import BadMessageError
from verl_sync_plugin.transport.listener import Listener, connect
from verl_sync_plugin.transport.protocol import Commit, Failed, Join, Load

WAIT = 20.0
BOUND = 0.5


def echo(address: str) -> None:
    """The other process: returns what it hears, until it hears ``Commit``."""
    channel = connect(address, WAIT, WAIT)
    while (message := channel.receive(WAIT)) != Commit():
        channel.send(message)
    channel.close()


def greet_and_die(address: str) -> None:
    """The other process: says one word and is gone without closing anything."""
    connect(address, WAIT, WAIT).send(Join("hello"))
    os._exit(1)


def talk(address: str) -> None:
    """The other process: sends a manifest before it hears one."""
    channel = connect(address, WAIT, WAIT)
    mine = manifest(64, 8, 32)
    channel.send(mine)
    channel.send(Load(0, int(channel.receive(WAIT) == mine)))
    channel.receive(WAIT)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener(WAIT)
    yield listening
    listening.close()


def started(target: Callable[[str], None], listener: Listener) -> tuple[BaseProcess, Channel]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(listener.address,), daemon=True)
    process.start()
    channel = listener.accept(WAIT)
    assert channel is not None
    return process, channel


def pair() -> tuple[socket.socket, Channel]:
    """A bare socket, and the channel at its other end."""
    bare, other = socket.socketpair(socket.AF_UNIX)
    return bare, Channel(other, BOUND)


@contextmanager
def bounded(least: float = 0.0) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert least <= time.monotonic() - before < BOUND + 2


def test_messages_go_both_ways(listener: Listener) -> None:
    process, channel = started(echo, listener)
    messages: list[Any] = [Join("1 (step 1)"), Load(7, 2), Failed("x" * (1 << 20)), manifest(64, 8, 32)]
    for message in messages:
        channel.send(message)
        assert channel.receive(WAIT) == message
    for message in messages:
        channel.send(message)
    assert [channel.receive(WAIT) for _ in messages] == messages, "several that came at once"
    channel.send(Commit())
    process.join(WAIT)
    assert process.exitcode == 0


def test_silence_ends_in_a_timeout(listener: Listener) -> None:
    process, channel = started(echo, listener)
    with bounded(0.2), pytest.raises(ChannelTimeoutError, match=r"no word .* within 0\.2 s$"):
        channel.receive(0.2)
    channel.send(Failed("still usable"))
    assert channel.receive(WAIT) == Failed("still usable")
    channel.send(Commit())
    process.join(WAIT)


def test_a_stopped_process_that_is_sent_a_manifest_ends_in_a_timeout() -> None:
    listening = Listener(BOUND)
    process, channel = started(echo, listening)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"did not take a Manifest of \d{7} bytes"):
            channel.send(manifest(64, 8, 32))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT)
        listening.close()


def test_a_message_of_which_only_a_part_comes_ends_in_a_timeout() -> None:
    bare, channel = pair()
    for part in (b"\0\0", struct.pack("!H", 1000) + b"\0some"):
        bare.sendall(part)
        assert channel.has_word()
        with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"but \d bytes of one"):
            channel.receive(BOUND)


def test_who_sends_ever_more_of_a_message_has_no_more_time() -> None:
    bare, channel = pair()
    bare.sendall(struct.pack("!I", 1 << 20))
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.001):
            bare.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with bounded(BOUND), pytest.raises(ChannelTimeoutError):
        channel.receive(BOUND)
    over.set()
    thread.join()


def test_who_takes_a_message_bit_by_bit_has_no_more_time() -> None:
    bare, channel = pair()
    over = threading.Event()

    def sip() -> None:
        while not over.wait(0.01):
            bare.recv(512)

    thread = threading.Thread(target=sip)
    thread.start()
    with bounded(BOUND), pytest.raises(ChannelTimeoutError):
        channel.send(Failed("x" * (8 << 20)))
    over.set()
    thread.join()


def test_two_that_send_at_once_do_not_wait_for_each_other(listener: Listener) -> None:
    process, channel = started(talk, listener)
    time.sleep(0.5)  # until neither socket takes more
    mine = manifest(64, 8, 32)
    channel.send(mine)
    assert channel.receive(WAIT) == mine
    assert channel.receive(WAIT) == Load(0, 1), "and the other side has heard the same"
    channel.send(Commit())
    process.join(WAIT)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("!I", (1 << 31) - 1), "2147483647 bytes is announced"),
        (b"GET / HTTP/1.1\r\n", "is announced"),
        (struct.pack("!I", 0), "no message"),
        (struct.pack("!IB", 1, 250), "no message"),
        (struct.pack("!I", 6) + b"\0cos\nx", "not a Join"),
        (struct.pack("!IBB", 2, 6, 0x91), "not a Load"),
    ],
    ids=["2 GB", "http", "empty", "unknown kind", "pickle", "cut"],
)
def test_what_is_no_message_is_refused_at_once(data: bytes, text: str) -> None:
    bare, channel = pair()
    bare.sendall(data)
    with bounded(), pytest.raises(BadMessageError, match=text):
        channel.receive(WAIT)
    with pytest.raises(ChannelClosedError):
        channel.receive(WAIT)


def test_dead_peer_is_noticed(listener: Listener) -> None:
    process, channel = started(greet_and_die, listener)
    process.join(WAIT)
    assert channel.receive(WAIT) == Join("hello")
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        channel.receive(WAIT)
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        for _ in range(100):
            channel.send(Failed("x" * 4096))
    assert channel.has_word(), "receive() does not wait"


def test_own_close_is_a_closed_channel() -> None:
    _, channel = pair()
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosedError):
        channel.send(Commit())
    with pytest.raises(ChannelClosedError):
        channel.receive(0.1)
