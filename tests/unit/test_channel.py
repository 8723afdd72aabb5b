# SPDX-License-Identifier: Apache-2.0
"""Covers the control channel: what is refused, who is let in, and that every wait has a bound."""

import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verl_sync_plugin.transport import protocol
from verl_sync_plugin.transport.channel import (
    BadMessageError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Listener,
    connect,
)

WAIT, BOUND, NOBODY = 20.0, 0.5, 65534


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener(WAIT, f"@verl-sync-{uuid.uuid4()}")
    yield listening
    listening.close()


def pair() -> tuple[socket.socket, Channel]:
    """A bare socket, and the channel at its other end."""
    bare, other = socket.socketpair(socket.AF_UNIX)
    return bare, Channel(other, BOUND)


@contextmanager
def bounded(least: float = 0.0) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert least <= time.monotonic() - before < BOUND + 2


@pytest.mark.parametrize("part", [b"", b"\0\0", struct.pack("!i", 1000) + b"some"], ids=["silence", "head", "part"])
def test_a_message_that_does_not_come_whole_ends_in_a_timeout(part: bytes) -> None:
    bare, channel = pair()
    bare.sendall(part)
    assert channel.has_message() is bool(part)
    with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"no whole word .* within 0\.5 s$"):
        channel.receive(BOUND)
    assert channel.has_message() is bool(part), "nothing more can be received after a part"


def test_a_message_that_nobody_takes_ends_in_a_timeout() -> None:
    _bare, channel = pair()
    with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"did not take a Failed of \d{7} bytes"):
        channel.send(protocol.Failed("x" * (4 << 20)))


@pytest.mark.parametrize(("data", "error"), [
    pytest.param(b"GET / HTTP/1.1\r\n", ChannelClosedError, id="http"),
    pytest.param(struct.pack("!i", 0), BadMessageError, id="empty"),
    pytest.param(struct.pack("!i", 5) + b"cos\nx", BadMessageError, id="pickle"),
    pytest.param(struct.pack("!i", 12) + b"\x81\xa4type\xa5Nobod", BadMessageError, id="cut"),
    pytest.param(struct.pack("!i", 13) + b"\x81\xa4type\xa6Nobody", BadMessageError, id="unknown kind"),
])  # fmt: skip
def test_what_is_no_message_is_refused_at_once(data: bytes, error: type[Exception]) -> None:
    bare, channel = pair()
    bare.sendall(data)
    with bounded(), pytest.raises(error):
        channel.receive(WAIT)
    with pytest.raises(ChannelClosedError):
        channel.receive(WAIT)


def test_a_peer_that_is_gone_is_noticed_after_its_last_word() -> None:
    bare, channel = pair()
    Channel(bare, BOUND).send(protocol.Failed("hello"))
    bare.close()
    assert channel.receive(WAIT) == protocol.Failed("hello")
    for say in (lambda: channel.receive(WAIT), lambda: channel.send(protocol.Failed("x" * 4096))):
        with bounded(), pytest.raises(ChannelClosedError, match="gone"):
            say()
    assert channel.has_message(), "receive() does not wait"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_not_let_in(listener: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    connects = (
        f"import os, socket, sys; os.setgid({NOBODY}); os.setuid({NOBODY}); "
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1][1:]); s.recv(1)"
    )
    stranger = subprocess.Popen([sys.executable, "-c", connects, listener.address])
    while stranger.poll() is None:  # until it is hung up on
        assert listener.accept(0.1) is None
    assert stranger.returncode == 0 and f"belongs to user {NOBODY}" in capfd.readouterr().out


def test_who_comes_late_is_refused_at_once_and_who_waits_is_hung_up_on(listener: Listener) -> None:
    waiting = connect(listener.address, WAIT)
    for _ in range(2):
        listener.close()
    with bounded(), pytest.raises(ChannelClosedError, match="nobody listens"):
        connect(listener.address, WAIT)
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        waiting.receive(WAIT)


def test_connect_to_a_full_queue_times_out(listener: Listener) -> None:
    """A trainer rank that never accepts must not block the engine for longer."""
    held = []
    with bounded(BOUND), pytest.raises(ChannelClosedError, match="temporarily unavailable"):
        for _ in range(100):
            held.append(connect(listener.address, BOUND))
    assert len(held) > 1
