"""The control channel: length-prefixed messages over a Unix socket between two processes of one user on one host.

Hazard: messages are pickles, so the socket lives in a directory only its owner can enter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class ChannelTimeoutError(TimeoutError):
    """The other side said nothing in time."""


class Channel:
    """One connected end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Sends one picklable message.

        Raises:
            ChannelClosedError: the other side closed or died.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise ChannelClosedError(f"the other side of the weight-sync channel is gone ({error})") from error

    def has_word(self) -> bool:
        """Whether ``receive`` would return (or raise) at once."""
        try:
            return self._connection.poll(0)
        except OSError:
            return True

    def receive(self, timeout: float) -> Any:
        """Waits at most ``timeout`` seconds for one message.

        Raises:
            ChannelTimeoutError: nothing came in time.
            ChannelClosedError: the other side closed or died.
        """
        try:
            if not self._connection.poll(timeout):
                raise ChannelTimeoutError(f"no word on the weight-sync channel within {timeout:g} s")
            return self._connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, ChannelTimeoutError):
                raise
            raise ChannelClosedError(f"the other side of the weight-sync channel is gone ({error!r})") from error

    def close(self) -> None:
        self._connection.close()


class Listener:
    """The sender's end before anybody has connected; one per trainer rank, kept over all syncs."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="verl-sync-", dir=_short_folder())
        self.address = os.path.join(self._directory, "channel")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen(8)  # leftovers of failed syncs wait here too
        self._finalizer = weakref.finalize(self, _dispose, self._socket, self._directory)

    def accept(self, timeout: float) -> Channel | None:
        """The next connection, or ``None`` when there is none within ``timeout`` seconds."""
        self._socket.settimeout(timeout)
        try:
            accepted, _ = self._socket.accept()
        except (TimeoutError, BlockingIOError):  # the latter where the timeout is zero
            return None
        accepted.setblocking(True)
        return Channel(Connection(accepted.detach()))

    def close(self) -> None:
        self._finalizer()


def _short_folder() -> str | None:
    """A folder for sockets: their address holds some 107 bytes, and TMPDIR of a cluster may be longer than that."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= 70 else "/tmp"


def _dispose(listening: socket.socket, directory: str) -> None:
    with contextlib.suppress(OSError):
        listening.close()
    shutil.rmtree(directory, ignore_errors=True)


def connect(address: str, timeout: float) -> Channel:
    """Connects to a ``Listener``.

    Raises:
        ChannelTimeoutError: nobody listens at ``address`` within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A full queue of the listener would block without bound
        client.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            client.connect(address)
            client.setblocking(True)
            return Channel(Connection(client.detach()))
        except OSError as error:
            client.close()
            if time.monotonic() > deadline:
                raise ChannelTimeoutError(f"no trainer rank listens at {address} ({error})") from error
            time.sleep(0.01)
