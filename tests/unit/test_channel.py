# SPDX-License-Identifier: Apache-2.0
"""The control channel between two real processes: what arrives, who is let in, and that every wait has a bound."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from manifests import manifest

from verl_sync_plugin.layout.load_map import Box, Constant, Kept, Left, LoadMap, Move, Place
from verl_sync_plugin.transport import protocol
from verl_sync_plugin.transport.channel import (
    MESSAGES,
    BadMessageError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Listener,
    connect,
)
from verl_sync_plugin.transport.memory import Live, Region, StagingExport
from verl_sync_plugin.transport.protocol import Commit, Failed, Hello, Load

WAIT = 20.0
START = 120.0  # a process imports torch
BOUND = 0.5


def echo(address: str) -> None:
    """The other process: returns what it hears, until it hears ``Commit``."""
    channel = connect(address, WAIT, WAIT)
    while (message := channel.receive(WAIT)) != Commit():
        channel.send(message)
    channel.close()


def greet_and_die(address: str) -> None:
    """The other process: says one word and is gone without closing anything."""
    connect(address, WAIT, WAIT).send(Failed("hello"))
    os._exit(1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener(WAIT)
    yield listening
    listening.close()


def started(target: Callable[[str], None], listener: Listener) -> tuple[BaseProcess, Channel]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(listener.address,), daemon=True)
    process.start()
    channel = listener.accept(START)
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
    messages: list[Any] = [
        Load(1, 1),
        Load(7, 2),
        Failed("x" * (1 << 20)),
        Hello("1", "plan", (), manifest=manifest(64, 8, 32)),
    ]
    for message in messages:
        channel.send(message)
        assert channel.receive(WAIT) == message
    for message in messages[:2]:
        channel.send(message)
    assert [channel.receive(WAIT) for _ in range(2)] == messages[:2], "several that came at once"
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
        with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"did not take a Hello of \d{7} bytes"):
            channel.send(Hello("1", "plan", (), manifest=manifest(64, 8, 32)))
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


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("!I", (1 << 31) - 1), "2147483647 bytes is announced"),
        (b"GET / HTTP/1.1\r\n", "is announced"),
        (struct.pack("!I", 0), "no message"),
        (struct.pack("!IB", 1, 250), "no message"),
        (struct.pack("!I", 6) + b"\0cos\nx", "not a Hello"),
        (struct.pack("!IBB", 2, 3, 0x91), "not a Load"),
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
    assert channel.receive(WAIT) == Failed("hello")
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        channel.receive(WAIT)
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        for _ in range(100):
            channel.send(Failed("x" * 4096))
    assert channel.has_word(), "receive() does not wait"


# What torch's _share_cuda_() makes of a storage: device, memory, size, offset, counter, its offset, event, and whether
# to wait for that
SHARED = ("GPU-0", b"\x00\xff" * 33, 1 << 40, 512, b"/torch_1_2_3", 7, b"\x80" * 64, True)
STAGING = StagingExport("cuda_ipc", "key", 1 << 40, SHARED, 1 << 39)
REGION = Region("cuda_ipc", "key-1", (1 << 63) - 1, (b"\x00" * 64,))
BOX = Box(1, 2, ((3, 4, 5), (6, 1, 1)))
MAP = LoadMap(
    "LlamaForCausalLM", 4, (Place("a", (Kept("a", "bfloat16", BOX, False),)),), (Move(0, 0, "bfloat16", BOX),),
    (Constant(0, ((0, 4),), b"\x00\xff"),), (Left(1, "why", "", ((0, 1 << 40),)),), ((0, ((1, 2),)),), ((2, "b"),),
    ((3, "c"),), True, "unknown", "full",
)  # fmt: skip
LIVE = Live("key", (REGION, Region("shared_file", "/a", 1, ("/a",))), (b"\x01" * 40, b""))
EXAMPLES = [
    protocol.Hello("1", "digest", (STAGING, STAGING), 1, ("a", "b"), True, 1, True, "map", manifest(2, 3), (LIVE,)),
    protocol.Ready("PermissionError: ü", True),
    protocol.Ready(map=MAP),
    protocol.Load(protocol.ALL, 0),
    protocol.Loaded(3, 0.25, 17.5),
    protocol.Commit(True),
    protocol.Committed(1, 2, 3, 4, b"\xff" * 8, "why", 5, protocol.Held(b"\x01" * 16, 7, ("c",)), MAP),
    protocol.Failed("a\nb"),
]


def test_every_kind_of_message_comes_back_as_it_was() -> None:
    assert {type(message) for message in EXAMPLES} == set(MESSAGES)
    one, other = (Channel(end, BOUND) for end in socket.socketpair(socket.AF_UNIX))
    for message in EXAMPLES:
        one.send(message)
        back = other.receive(WAIT)
        assert repr(back) == repr(message), "True is not 1, and a tuple is no list"


NOBODY = 65534
CONNECTS = (
    f"import os, socket, sys; os.setgid({NOBODY}); os.setuid({NOBODY}); "
    "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1][1:]); s.recv(1)"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_not_let_in(listener: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", CONNECTS, listener.address])
    assert listener.accept(3.0) is None
    assert stranger.wait(WAIT) == 0, "it was not hung up on"
    assert f"belongs to user {NOBODY}" in capfd.readouterr().out


def test_who_comes_late_is_refused_at_once_and_who_waits_is_hung_up_on(listener: Listener) -> None:
    waiting = connect(listener.address, WAIT, WAIT)
    forked = socket.socket(fileno=os.dup(listener._socket.fileno()))  # as a process holds that was forked from this one
    listener.close()
    listener.close()
    with bounded(), pytest.raises(ChannelClosedError, match="nobody listens"):
        connect(listener.address, WAIT, WAIT)
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        waiting.receive(WAIT)
    forked.close()


def test_connect_to_a_full_queue_times_out(listener: Listener) -> None:
    """A trainer rank that never accepts must not block the engine for longer."""
    held = []
    with pytest.raises(ChannelTimeoutError):
        for _ in range(100):
            held.append(connect(listener.address, 0.2, WAIT))
    assert len(held) > 1
