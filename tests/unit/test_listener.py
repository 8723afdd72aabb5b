# SPDX-License-Identifier: Apache-2.0
"""How the two ends of a control channel find each other: by name, without a file, and among one user's processes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError
from verl_sync_plugin.transport.listener import Listener, connect
from verl_sync_plugin.transport.protocol import Join

WAIT = 20.0
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener(WAIT)
    yield listening
    listening.close()


def test_nobody_guesses_a_name_and_it_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = Listener(WAIT), Listener(WAIT)
    assert first.address != second.address and len(first.address) >= 32
    assert "\0" not in first.address, "it travels through SGLang's own messages"
    channel = connect(first.address, WAIT, WAIT)
    assert not list(tmp_path.iterdir())
    channel.close()


def test_a_name_is_free_again_once_its_listener_is_closed(listener: Listener) -> None:
    listener.close()
    listener.close()
    with pytest.raises(ChannelTimeoutError):
        connect(listener.address, 0.1, WAIT)


def test_accept_returns_none_when_nobody_comes(listener: Listener) -> None:
    before = time.monotonic()
    assert listener.accept(0) is None
    assert listener.accept(0.05) is None
    assert 0.05 <= time.monotonic() - before < 2


def test_connect_without_listener_times_out() -> None:
    before = time.monotonic()
    with pytest.raises(ChannelTimeoutError, match="@nobody-here"):
        connect("@nobody-here", 0.2, WAIT)
    assert 0.2 <= time.monotonic() - before < 2


def test_a_path_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no address of a trainer rank"):
        connect(str(tmp_path / "channel"), WAIT, WAIT)


def test_connect_waits_for_a_late_listener() -> None:
    """The engine may be invited a moment before its trainer rank listens."""
    name = secrets.token_hex(16)
    late = socket.socket(socket.AF_UNIX)

    def listen() -> None:
        late.bind(f"\0{name}")
        late.listen()

    timer = threading.Timer(0.2, listen)
    timer.start()
    connect(f"@{name}", WAIT, WAIT).send(Join("late"))
    timer.join()
    assert Channel(late.accept()[0], WAIT).receive(WAIT) == Join("late")
    late.close()


def test_connect_to_a_full_queue_times_out(listener: Listener) -> None:
    """A trainer rank that never accepts must not block the engine beyond the timeout."""
    held = []
    with pytest.raises(ChannelTimeoutError):
        for _ in range(1000):
            held.append(connect(listener.address, 0.2, WAIT))
    assert len(held) > 1
    for channel in held:
        channel.close()


BECOMES = f"import os, socket, sys; os.setgid({NOBODY}); os.setuid({NOBODY})"
CONNECTS = f"{BECOMES}; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1][1:]); s.recv(1)"
LISTENS = (
    f"{BECOMES}; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1][1:]); s.listen(); "
    "print('there', flush=True); s.accept()[0].recv(1)"
)


@needs_root
def test_another_users_process_is_not_let_in(listener: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", CONNECTS, listener.address])
    assert listener.accept(3.0) is None
    assert stranger.wait(WAIT) == 0, "it was not hung up on"
    assert f"belongs to user {NOBODY}" in capfd.readouterr().out


@needs_root
def test_nothing_is_said_to_another_users_listener() -> None:
    address = f"@{secrets.token_hex(16)}"
    command = [sys.executable, "-c", LISTENS, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == "there\n"
        with pytest.raises(ChannelClosedError, match=f"no trainer rank: process {stranger.pid} belongs to user"):
            connect(address, WAIT, WAIT)
        assert stranger.wait(WAIT) == 0
