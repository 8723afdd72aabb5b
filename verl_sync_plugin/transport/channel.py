# SPDX-License-Identifier: Apache-2.0
"""The control channel: messages over a Unix socket between two processes of one user on one host.

Every sync has a socket of its own (``sync/endpoint.py``), abstract, so that no file can be left over. Frames are those
of ``multiprocessing.connection``. A frame holds msgpack, which is decoded into exactly the types of ``protocol.py``:
nothing that comes in can make this process run anything, which a pickle could. It is faster, too: the manifest of
20177 tensors in 161416 pieces (5 MB) is encoded in 8 ms and decoded in 62 ms on a CPU core that takes 406 and 188 ms to
pickle and unpickle it. No wait for the other side is without a bound, which the kernel keeps: not for a message, not
for the rest of one, and not for the other side to take one.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import MESSAGES

MOST_BYTES = 1 << 30  # of a message; a manifest of 20000 tensors on 8 ranks has 5 MB
_BACKLOG = 8  # one engine rank is expected
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(MESSAGES)


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class ChannelTimeoutError(TimeoutError):
    """The other side said nothing, or took nothing, in time."""


class BadMessageError(ValueError):
    """The bytes received are no message of this protocol."""


class Channel:
    """One connected end: owns its socket. ``seconds`` bounds every wait within a message: for its next bytes, or for
    the other side to take some."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        _bound(connected, seconds)
        self._seconds, self._connection = seconds, Connection(connected.detach())

    def send(self, message: Any) -> None:
        """Sends one of ``MESSAGES``. Raises ChannelTimeoutError where the other side did not take it in time (the
        channel is of no use any more), ChannelClosedError where that has closed or died, ValueError where it is too
        long."""
        data = _encoder.encode(message)
        said = f"a {type(message).__name__} of {len(data)} bytes"
        if len(data) > MOST_BYTES:
            raise ValueError(f"{said} is too long for the weight-sync channel")
        try:
            self._connection.send_bytes(data)
        except BlockingIOError as error:
            late = f"the other side of the weight-sync channel did not take {said} within {self._seconds:g} s"
            raise ChannelTimeoutError(late) from error
        except OSError as error:
            raise _gone(error) from error

    def has_message(self) -> bool:
        """True if a message has begun, or ``receive`` would raise at once."""
        return self._connection.closed or self._connection.poll(0)

    def receive(self, timeout: float) -> Any:
        """The next message. Raises ChannelTimeoutError where it does not begin within ``timeout`` seconds, or does not
        go on (nothing more can be received then), ChannelClosedError where the other side has closed or died, or sends
        what is no frame, BadMessageError where that is no message (nothing more can be received then)."""
        data = None
        try:
            if self._connection.poll(max(timeout, 0.0)):
                data = self._connection.recv_bytes(MOST_BYTES)
        except BlockingIOError:  # in the middle of it
            self.close()
        except (EOFError, OSError) as error:
            raise _gone(error) from error
        if data is None:
            raise ChannelTimeoutError(f"no whole word on the weight-sync channel within {timeout:g} s")
        try:
            return _decoder.decode(data)
        except msgspec.DecodeError as error:
            self.close()
            raise BadMessageError(f"no message of the weight-sync protocol: {error}") from error

    def close(self) -> None:
        self._connection.close()


class Listener:
    """One end before the other has connected to ``address``. Raises OSError where somebody listens there already, or
    this process has too many open files."""

    def __init__(self, seconds: float, address: str) -> None:
        self._seconds, self.address = seconds, address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_abstract(address))
        self._socket.listen(_BACKLOG)

    def accept(self, timeout: float) -> Channel | None:
        """The next connection of a process of this user, or ``None`` when there is none within ``timeout`` seconds.
        Raises OSError where the listener is closed, or this process has too many open files."""
        deadline, left = time.monotonic() + timeout, max(timeout, 0.0)
        while left >= 0:
            try:
                self._socket.settimeout(left)
                accepted, _ = self._socket.accept()
            except (BlockingIOError, TimeoutError):
                return None
            given = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            process, user, _ = _CREDENTIALS.unpack(given)
            if user in (os.geteuid(), 0):
                return Channel(accepted, self._seconds)
            say(f"a connection to the weight sync was dropped: process {process} belongs to user {user}")
            accepted.close()
            left = deadline - time.monotonic()
        return None

    def close(self) -> None:
        """Refuses new connections from now on, and closes those that wait in the queue."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may hold it, too
            while (channel := self.accept(0)) is not None:
                channel.close()
        except OSError:
            pass
        self._socket.close()


def connect(address: str, seconds: float) -> Channel:
    """Connects to a ``Listener``; ``seconds`` also bounds the wait for a place in its queue. Raises ChannelClosedError
    where there was none, or nobody listens there, or no longer."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _bound(client, seconds)
    try:
        client.connect(_abstract(address))
    except OSError as error:
        client.close()
        raise ChannelClosedError(f"nobody listens at {address}, or no longer ({error})") from error
    return Channel(client, seconds)


def _bound(connected: socket.socket, seconds: float) -> None:
    """Has the kernel end every wait for the other side."""
    connected.settimeout(None)
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, bound)


def _abstract(address: str) -> str:
    """The kernel's form of an address: a leading zero byte, which most serializers do not preserve."""
    return "\0" + address[1:]


def _gone(why: object) -> ChannelClosedError:
    return ChannelClosedError(f"the other side of the weight-sync channel is gone ({why})")
