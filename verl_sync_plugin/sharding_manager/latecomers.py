"""Engine ranks on their way to a sync that was given up."""

from __future__ import annotations

import threading

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.channel import Channel, Listener
from verl_sync_plugin.transport.protocol import Join

POLL_SECONDS = 0.2
JOIN_SECONDS = 1.0


class Latecomers:
    """Turns them away until the next sync is asked for, in a thread: SGLang may hold a load back for any time, and its
    scheduler would then wait in our loader for a trainer that does not come.

    An engine rank may also come early, for a sync that another trainer rank has begun and this one has not. It is kept.

    Args:
        listener: nobody else accepts from it meanwhile.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._given_up: set[str] = set()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._early: tuple[Channel, str] | None = None

    def turn_away(self, sync_id: str) -> None:
        """From now on; returns at once."""
        self._given_up.add(sync_id)
        if self._early is not None and self._early[1] in self._given_up:
            self._keep(None)
        if self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, name="verl-sync-latecomers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """The listener is the caller's again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_early(self, sync_id: str) -> Channel | None:
        """After ``stop``: the engine rank that has come for this sync already, if it has."""
        if self._early is None or self._early[1] != sync_id:
            self._keep(None)
            return None
        channel, self._early = self._early[0], None
        return channel

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                channel = self._listener.accept(POLL_SECONDS)
            except OSError as error:
                say(f"engine ranks of a failed sync are no longer turned away: {error}")
                return
            if channel is not None:
                self._judge(channel)

    def _judge(self, channel: Channel) -> None:
        try:
            join = channel.receive(JOIN_SECONDS)
        except Exception as error:
            say(f"a connection without a sync was dropped: {error}")
            join = None
        if isinstance(join, Join) and join.sync_id not in self._given_up:
            self._keep((channel, join.sync_id))
        else:
            channel.close()

    def _keep(self, early: tuple[Channel, str] | None) -> None:
        if self._early is not None:
            self._early[0].close()
        self._early = early
