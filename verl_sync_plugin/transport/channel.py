# SPDX-License-Identifier: Apache-2.0
"""The control channel: length-prefixed messages over a Unix socket between two processes of one user on one host.

No wait is without a bound: not for a message, not for the rest of one, and not for the other side to take one. How two
ends find each other is in ``listener.py``.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from typing import Any

from verl_sync_plugin.transport.codec import BadMessageError, decode, encode_into

MOST_BYTES = 1 << 30  # of a message; a manifest of 20000 tensors on 8 ranks has 12 MB
_HEADER = struct.Struct("!I")  # bytes that follow
_CHUNK = 1 << 16
_LONGEST_WAIT = 2**31 - 1  # milliseconds


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class ChannelTimeoutError(TimeoutError):
    """The other side said nothing, or took nothing, in time."""


class Channel:
    """One connected end.

    Args:
        connected: the socket; the channel's from now on.
        send_seconds: bound on every ``send``.

    Attributes:
        most: bytes of the longest message that is received.
    """

    most: int = MOST_BYTES

    def __init__(self, connected: socket.socket, send_seconds: float) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._send_seconds = send_seconds
        self._heard = bytearray()  # received, and not yet returned
        self._over = False  # nothing more can be received

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends one message of ``codec.MESSAGES``, and keeps what comes in meanwhile, so that two sides that send at
        once do not wait for each other.

        Raises:
            ChannelTimeoutError: the other side did not take it in time; the channel is of no use any more.
            ChannelClosedError: the other side closed or died.
            ValueError: it is too long.
        """
        frame = bytearray(_HEADER.size)
        encode_into(message, frame, _HEADER.size)
        length = len(frame) - _HEADER.size
        if length > MOST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {length} bytes is too long for the weight-sync channel")
        _HEADER.pack_into(frame, 0, length)
        rest, deadline = memoryview(frame), time.monotonic() + self._send_seconds
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                left, reads = deadline - time.monotonic(), not self._over and len(self._heard) <= self.most
                events = select.POLLOUT | select.POLLIN if reads else select.POLLOUT
                if left <= 0 or not ready(self._socket, events, left):
                    raise ChannelTimeoutError(
                        f"the other side of the weight-sync channel did not take a {type(message).__name__} of "
                        f"{length} bytes within {self._send_seconds:g} s"
                    ) from None
                if reads:
                    self._fetch()
            except OSError as error:
                raise _gone(error) from error

    def has_word(self) -> bool:
        """Whether a message has begun, or ``receive`` would raise at once."""
        return bool(self._heard) or self._over or ready(self._socket, select.POLLIN, 0)

    def receive(self, timeout: float) -> Any:
        """Waits at most ``timeout`` seconds for one whole message.

        Raises:
            ChannelTimeoutError: nothing came in time, or not all of it.
            ChannelClosedError: the other side closed or died.
            BadMessageError: what came is no message; nothing more can be received.
        """
        deadline = time.monotonic() + timeout
        while not (frame := self._frame()):
            if self._over:
                raise _gone("it has closed it")
            left = deadline - time.monotonic()
            waited = self._fetch() or (left > 0 and ready(self._socket, select.POLLIN, left))
            # Who sends ever more of a message has no more time than who sends nothing
            if not waited or (left <= 0 and not self._over and not self._frame()):
                begun = f" but {len(self._heard)} bytes of one" if self._heard else ""
                raise ChannelTimeoutError(f"no word on the weight-sync channel within {timeout:g} s{begun}")
        try:
            with memoryview(self._heard)[_HEADER.size : frame] as data:
                return decode(data)
        except BadMessageError:
            self._over = True
            raise
        finally:
            del self._heard[:frame]

    def close(self) -> None:
        self._over = True
        self._socket.close()

    def _frame(self) -> int:
        """Bytes of the first message and its header, 0 if it is not all there."""
        if len(self._heard) < _HEADER.size:
            return 0
        (length,) = _HEADER.unpack_from(self._heard)
        if length > self.most:
            self._over = True
            self._heard.clear()
            raise BadMessageError(f"a message of {length} bytes is announced on the weight-sync channel")
        end = _HEADER.size + int(length)
        return end if len(self._heard) >= end else 0

    def _fetch(self) -> bool:
        """Takes in what has come, without waiting; False when nothing has."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # reset: what came before still counts
            data = b""
        self._heard += data
        self._over = self._over or not data
        return True


def _gone(why: object) -> ChannelClosedError:
    return ChannelClosedError(f"the other side of the weight-sync channel is gone ({why})")


def ready(connected: socket.socket, events: int, seconds: float) -> bool:
    """Whether a socket has one of some events of ``select.poll`` within some seconds, or is closed on this side."""
    if connected.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(connected, events)
    return bool(poller.poll(min(math.ceil(max(seconds, 0.0) * 1000), _LONGEST_WAIT)))
