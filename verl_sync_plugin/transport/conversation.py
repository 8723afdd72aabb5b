# SPDX-License-Identifier: Apache-2.0
"""One trainer rank's words with the engine rank beside it; the state machine is in ``protocol.py``."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.transport.channel import Channel, describe
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.protocol import (
    Commit,
    Committed,
    Details,
    Failed,
    Hello,
    Load,
    Loaded,
    Manifest,
    Ready,
)

T = TypeVar("T")


class EngineFailedError(RuntimeError):
    """The engine rank beside this trainer rank reported a failure."""


class Greeting(NamedTuple):
    """The engine rank's answer to a ``Hello``.

    Attributes:
        unreachable: why it cannot read other trainer ranks' slots, and then the sync is over; else empty.
        map: what its model does with the tensors, if that was asked for.
    """

    unreachable: str
    map: LoadMap | None


class Conversation:
    """A trainer rank's messages with the engine rank beside it; each sync has a channel of its own.

    Args:
        timeout_seconds: bound on every wait.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._channel: Channel | None = None

    def adopt(self, channel: Channel) -> None:
        """Takes over a fresh channel, so that ``hang_up`` ends it whatever happens next."""
        self.hang_up()
        self._channel = channel

    def greet(self, hello: Hello, plan: Plan) -> Greeting:
        """Opens a sync on the adopted channel.

        Args:
            hello: the first word.
            plan: the buckets.

        Raises:
            ChannelClosedError, ChannelTimeoutError: the engine rank is gone or silent.
            EngineFailedError: it refused.
        """
        channel = self._open_channel()
        channel.send(hello)
        ready = self._expect(Ready)
        if ready.needs_plan:
            channel.send(Details(Manifest.of(plan)))
        asks = hello.tells and not ready.unreachable
        return Greeting(ready.unreachable, self._expect(Ready).map if asks else None)

    def greet_live(self, hello: Hello, lives: tuple[Live, ...]) -> str:
        """Like ``greet``, when the engine rank is to read parameters where they lie.

        Args:
            hello: names the lives.
            lives: of all ranks of the group.

        Returns:
            Why it cannot, and then the sync is over; else empty.
        """
        channel = self._open_channel()
        channel.send(hello)
        ready = self._expect(Ready)
        if ready.needs_live and not ready.unreachable:
            channel.send(Details(lives=lives))
            ready = self._expect(Ready)
        return ready.unreachable

    def load(self, bucket_index: int, slot: int) -> None:
        """Tells the engine rank that a slot is ready."""
        self._open_channel().send(Load(bucket_index, slot))

    def wait_loaded(self, bucket_index: int) -> Loaded:
        """Waits until the engine rank no longer needs a bucket's slot."""
        loaded = self._expect(Loaded)
        assert loaded.bucket == bucket_index, f"{describe(loaded)} while waiting for bucket {bucket_index}"
        return loaded

    def commit(self, unmap: bool = False) -> Committed:
        """Ends the sync on this rank; returns what the engine rank did.

        Args:
            unmap: have it let go of all staging memory.
        """
        self._open_channel().send(Commit(unmap))
        return self._expect(Committed)

    def hang_up(self) -> bool:
        """Ends the sync whatever its state; the engine rank drops what is unfinished.

        Returns:
            Whether there was a channel to close.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        return channel is not None

    def _open_channel(self) -> Channel:
        assert self._channel is not None, "adopt() comes first"
        return self._channel

    def _expect(self, kind: type[T]) -> T:
        message = self._open_channel().receive(self._timeout)
        if isinstance(message, Failed):
            raise EngineFailedError(f"the engine could not load the weights: {message.text}")
        if not isinstance(message, kind):
            raise EngineFailedError(f"weight-sync protocol: expected {kind.__name__}, got {describe(message)}")
        return message
