# SPDX-License-Identifier: Apache-2.0
"""Covers the control channel: what is refused, who is let in, and that every wait has a bound."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from verl_sync_plugin.transport import channel as transport
from verl_sync_plugin.transport import protocol
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError, Listener, connect

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


WORD = struct.pack("!H", 1000) + b"\0some"
TRICKLE = [struct.pack("!IB", 1000, 0), *[b"x"] * 60]


@pytest.mark.parametrize("parts", [[], [b"\0\0"], [WORD], TRICKLE], ids=["silence", "head", "part", "trickle"])
def test_a_message_that_does_not_come_whole_ends_in_a_timeout(parts: list[bytes]) -> None:
    bare, channel = pair()

    def say(parts: list[bytes]) -> None:
        with suppress(OSError):
            for part in parts:
                bare.sendall(part)
                time.sleep(BOUND / 10 if len(parts) > 1 else 0)

    say(parts[:1])
    assert channel.has_word() is bool(parts)
    threading.Thread(target=say, args=(parts[1:],)).start()
    said = f"no word .* within 0.5 s{r' but .*[0-9]+ bytes of one' if parts else ''}$"
    with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=said):
        channel.receive(BOUND)
    channel.close()


def test_a_message_that_nobody_takes_ends_in_a_timeout() -> None:
    _bare, channel = pair()
    with bounded(BOUND), pytest.raises(ChannelTimeoutError, match=r"did not take a Failed of \d{7} bytes"):
        channel.send(protocol.Failed("x" * (4 << 20)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(struct.pack("!I", (1 << 31) - 1), "2147483647 bytes is announced", id="2 GB"),
        pytest.param(b"GET / HTTP/1.1\r\n", "is announced", id="http"),
        pytest.param(struct.pack("!I", 0), "no message", id="empty"),
        pytest.param(struct.pack("!IB", 1, 250), "no message", id="unknown kind"),
        pytest.param(struct.pack("!I", 6) + b"\0cos\nx", "not a Hello", id="pickle"),
        pytest.param(struct.pack("!IBB", 2, 3, 0x91), "not a Load", id="cut"),
    ],
)
def test_what_is_no_message_is_refused_at_once(data: bytes, text: str) -> None:
    bare, channel = pair()
    bare.sendall(data)
    with bounded(), pytest.raises(transport.BadMessageError, match=text):
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
    assert channel.has_word(), "receive() does not wait"


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
    waiting = connect(listener.address, WAIT, WAIT)
    for _ in range(2):
        listener.close()
    with bounded(), pytest.raises(ChannelClosedError, match="nobody listens"):
        connect(listener.address, WAIT, WAIT)
    with bounded(), pytest.raises(ChannelClosedError, match="gone"):
        waiting.receive(WAIT)


def test_connect_to_a_full_queue_times_out(listener: Listener) -> None:
    """A trainer rank that never accepts must not block the engine for longer."""
    held = []
    with pytest.raises(ChannelTimeoutError):
        for _ in range(100):
            held.append(connect(listener.address, 0.2, WAIT))
    assert len(held) > 1
