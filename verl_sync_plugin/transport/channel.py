# SPDX-License-Identifier: Apache-2.0
"""The control channel: messages over a Unix socket between two processes of one user on one host.

Every sync has a socket of its own (``sync/endpoint.py``), abstract, so that no file can be left over. A message is four
bytes of length, a byte that names its kind, and msgpack that is decoded into exactly the types of ``protocol.py``:
nothing that comes in can make this process run anything, which a pickle could. It is faster, too: the manifest of
20177 tensors in 161416 pieces (5 MB) is encoded in 8 ms and decoded in 62 ms on a CPU core that takes 406 and 188 ms to
pickle and unpickle it. No wait is without a bound: not for a message, not for the rest of one, and not for the other
side to take one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import Any

import msgspec

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import Commit, Committed, Failed, Hello, Load, Loaded, Ready

MOST_BYTES = 1 << 30  # of a message; a manifest of 20000 tensors on 8 ranks has 12 MB
_HEADER = struct.Struct("!IB")  # bytes that follow these four, and the number of the kind
_LENGTH = 4
_CHUNK = 1 << 16
_BACKLOG = 8  # one engine rank is expected
_CREDENTIALS = struct.Struct("iII")  # process, user, group
MESSAGES: tuple[type, ...] = (Hello, Ready, Load, Loaded, Commit, Committed, Failed)
_encoder = msgspec.msgpack.Encoder()
_kinds = {kind: number for number, kind in enumerate(MESSAGES)}
_decoders: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(msgspec.msgpack.Decoder(kind) for kind in MESSAGES)


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class ChannelTimeoutError(TimeoutError):
    """The other side said nothing, or took nothing, in time."""


class BadMessageError(ValueError):
    """The bytes received are no message of this protocol."""


class Channel:
    """One connected end: owns its socket; ``send_seconds`` bounds every ``send``."""

    def __init__(self, connected: socket.socket, send_seconds: float) -> None:
        self._socket = connected
        self._send_seconds = send_seconds
        self._heard = bytearray()  # received, and not yet returned
        self._over = False  # nothing more can be received

    def send(self, message: Any) -> None:
        """Sends one of ``MESSAGES``. Raises ChannelTimeoutError where the other side did not take it in time (the
        channel is of no use any more), ChannelClosedError where that has closed or died, ValueError where it is too
        long."""
        frame = bytearray(_HEADER.size)
        _encoder.encode_into(message, frame, _HEADER.size)
        length = len(frame) - _LENGTH
        if length > MOST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {length} bytes is too long for the weight-sync channel")
        _HEADER.pack_into(frame, 0, length, _kinds[type(message)])
        try:
            self._socket.settimeout(self._send_seconds)
            self._socket.sendall(frame)
        except TimeoutError as error:
            raise ChannelTimeoutError(
                f"the other side of the weight-sync channel did not take a {type(message).__name__} of {length} bytes "
                f"within {self._send_seconds:g} s"
            ) from error
        except OSError as error:
            raise _gone(error) from error

    def has_word(self) -> bool:
        """True if a message has begun, or ``receive`` would raise at once."""
        if self._heard or self._over or self._socket.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def receive(self, timeout: float) -> Any:
        """Waits at most ``timeout`` seconds for one whole message. Raises ChannelTimeoutError where not all of it came
        in time, ChannelClosedError where the other side has closed or died, BadMessageError where what came is no
        message (nothing more can be received then)."""
        deadline, left = time.monotonic() + timeout, max(timeout, 0.0)
        while not (frame := self._frame()):
            if self._over:
                raise _gone("it has closed it")
            # Who sends ever more of a message has no more time than who sends nothing
            if left < 0 or not self._fetch(left):
                begun = f" but {len(self._heard)} bytes of one" if self._heard else ""
                raise ChannelTimeoutError(f"no word on the weight-sync channel within {timeout:g} s{begun}")
            left = deadline - time.monotonic()
        try:
            with memoryview(self._heard)[:frame] as data:
                return _decode(data)
        except BadMessageError:
            self._over = True
            raise
        finally:
            del self._heard[:frame]

    def close(self) -> None:
        self._over = True
        self._socket.close()

    def _frame(self) -> int:
        """Bytes of the first message with its length, 0 if it is not all there."""
        if len(self._heard) < _LENGTH:
            return 0
        end = _LENGTH + int.from_bytes(self._heard[:_LENGTH], "big")
        if end - _LENGTH > MOST_BYTES:
            self._over = True
            self._heard.clear()
            raise BadMessageError(f"a message of {end - _LENGTH} bytes is announced on the weight-sync channel")
        return end if len(self._heard) >= end else 0

    def _fetch(self, seconds: float) -> bool:
        """Takes in what comes next; False when nothing does."""
        try:
            self._socket.settimeout(seconds)
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:  # reset: what came before still counts
            data = b""
        self._heard += data
        self._over = not data
        return True


class Listener:
    """One end before the other has connected to ``address``. Raises OSError where somebody listens there already, or
    this process has too many open files."""

    def __init__(self, send_seconds: float, address: str) -> None:
        self._send_seconds, self.address = send_seconds, address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_abstract(self.address))
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
                return Channel(accepted, self._send_seconds)
            say(f"a connection to the weight sync was dropped: process {process} belongs to user {user}")
            accepted.close()
            left = deadline - time.monotonic()
        return None

    def close(self) -> None:
        """From now on whoever comes is refused at once, and who waits here is hung up on."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may hold it, too
            while (channel := self.accept(0)) is not None:
                channel.close()
        except OSError:
            pass
        self._socket.close()


def connect(address: str, timeout: float, send_seconds: float) -> Channel:
    """Connects to a ``Listener``, which may have too many others waiting for ``timeout`` seconds. Raises
    ChannelClosedError where nobody listens there, or no longer, ChannelTimeoutError where its queue stays full, and
    ValueError for an address of no listener."""
    target, deadline = _abstract(address), time.monotonic() + timeout
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)  # a full queue of the listener would block without bound
        try:
            client.connect(target)
            return Channel(client, send_seconds)
        except BlockingIOError as error:
            client.close()
            if time.monotonic() > deadline:
                raise ChannelTimeoutError(f"the queue of {address} was full for {timeout:g} s") from error
            time.sleep(0.01)
        except OSError as error:
            client.close()
            raise ChannelClosedError(f"nobody listens at {address}, or no longer ({error})") from error


def _decode(data: memoryview) -> Any:
    kind = data[_LENGTH] if len(data) > _LENGTH else len(MESSAGES)
    if kind >= len(MESSAGES):
        raise BadMessageError(f"no message of the weight-sync protocol: {bytes(data[:40])!r}")
    try:
        return _decoders[kind].decode(data[_HEADER.size :])
    except msgspec.DecodeError as error:
        raise BadMessageError(f"not a {MESSAGES[kind].__name__} of the weight-sync protocol: {error}") from error


def _abstract(address: str) -> str:
    """The kernel's form of an address: a leading zero byte, which most serializers do not preserve."""
    if not address.startswith("@"):
        raise ValueError(f"{address!r} is no address of a trainer rank")
    return "\0" + address[1:]


def _gone(why: object) -> ChannelClosedError:
    return ChannelClosedError(f"the other side of the weight-sync channel is gone ({why})")
