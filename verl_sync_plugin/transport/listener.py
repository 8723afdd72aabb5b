# SPDX-License-Identifier: Apache-2.0
"""How the two ends of a control channel find each other, and make sure of each other.

The sockets are abstract: there is no file that could be left behind, or be cleaned away during a long run. Who is at
the other end is asked of the kernel, at both ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError, ready

_BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Listener:
    """The sender's end before anybody has connected; one per trainer rank, kept over all syncs.

    Args:
        send_seconds: of the channels.

    Attributes:
        address: for ``connect``; nobody guesses it.
    """

    def __init__(self, send_seconds: float) -> None:
        self._send_seconds = send_seconds
        self.address = f"@verl-sync-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_abstract(self.address))
        self._socket.listen(_BACKLOG)  # leftovers of failed syncs wait here too
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, timeout: float) -> Channel | None:
        """The next connection, or ``None`` when there is none within ``timeout`` seconds.

        Raises:
            OSError: the listener is closed, or this process has too many open files.
        """
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(BlockingIOError):
                accepted, _ = self._socket.accept()
                stranger = _stranger(accepted)
                if not stranger:
                    return Channel(accepted, self._send_seconds)
                say(f"a connection to the weight sync was dropped: {stranger}")
                accepted.close()
            seconds = deadline - time.monotonic()
            if seconds < 0 or not ready(self._socket, select.POLLIN, seconds):
                return None

    def close(self) -> None:
        self._socket.close()


def connect(address: str, timeout: float, send_seconds: float) -> Channel:
    """Connects to a ``Listener``.

    Args:
        address: of the listener.
        timeout: seconds.
        send_seconds: of the channel.

    Raises:
        ChannelTimeoutError: nobody listens at ``address`` within ``timeout`` seconds.
        ChannelClosedError: it is another user who listens there.
        ValueError: ``address`` is not one of a listener.
    """
    target, deadline = _abstract(address), time.monotonic() + timeout
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)  # a full queue of the listener would block without bound
        try:
            client.connect(target)
            break
        except OSError as error:
            client.close()
            if time.monotonic() > deadline:
                raise ChannelTimeoutError(f"no trainer rank listens at {address} ({error})") from error
            time.sleep(0.01)
    if stranger := _stranger(client):
        client.close()
        raise ChannelClosedError(f"whoever listens at {address} is no trainer rank: {stranger}")
    return Channel(client, send_seconds)


def _abstract(address: str) -> str:
    """The kernel's form of an address: a leading zero byte, which most serializers do not preserve."""
    if not address.startswith("@"):
        raise ValueError(f"{address!r} is no address of a trainer rank")
    return "\0" + address[1:]


def _stranger(connected: socket.socket) -> str:
    """Who the other end is, if neither this process's user nor root; else empty."""
    given = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(given)
    return "" if user in (os.geteuid(), 0) else f"process {process} belongs to user {user}"
