# SPDX-License-Identifier: Apache-2.0
"""Who connects to a trainer rank: its engine rank of this sync, one of another sync, or nobody that belongs here."""

from __future__ import annotations

import select
import threading
import time

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError
from verl_sync_plugin.transport.codec import BadMessageError
from verl_sync_plugin.transport.listener import Listener
from verl_sync_plugin.transport.protocol import Join

POLL_SECONDS = 0.2
JOIN_SECONDS = 5.0  # until a connection has to have said for which sync it is
JOIN_BYTES = 4096
AT_ONCE = 64  # connections accepted before those that are there are heard
MOST_SILENT = 256

Joined = tuple[Channel, str]  # and the sync it is for


class Arrivals:
    """The only place that accepts connections from this rank's listener; it waits for all of them together.

    Each connection has its time to say for which sync it comes. One that does not, or says something else, costs a line
    in the log.

    Between two syncs a thread turns away, until the next sync is asked for, engine ranks on their way to one that was
    given up: an engine may hold a load back for any time, and its scheduler would then wait in our loader for a trainer
    that does not come. An engine rank may also come early, for a sync that another trainer rank has begun and this one
    has not. It is kept.

    Args:
        listener: of this rank.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._silent: list[tuple[Channel, float]] = []  # with the time at which they have to have said something
        self._early: Joined | None = None
        self._given_up: set[str] = set()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, sync_id: str, seconds: float) -> Channel | None:
        """The engine rank that comes for this sync within some seconds, if it does; only while no thread runs. Engine
        ranks of other syncs are leftovers, and closed."""
        early, self._early = self._early, None
        joined = [early] if early is not None else []
        deadline = time.monotonic() + seconds
        while True:
            found = None
            for channel, named in joined:
                if found is None and named == sync_id:
                    found = channel
                else:
                    channel.close()
            remaining = deadline - time.monotonic()
            if found is not None or remaining < 0:
                return found
            joined = self._round(remaining)

    def turn_away(self, sync_id: str) -> None:
        """From now on; returns at once."""
        self._given_up.add(sync_id)
        if self._early is not None and self._early[1] in self._given_up:
            self._keep(None)
        if self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, name="verl-sync-arrivals", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                joined = self._round(POLL_SECONDS)
            except OSError as error:
                say(f"engine ranks of a failed sync are no longer turned away: {error}")
                return
            for channel, named in joined:
                if named in self._given_up:
                    channel.close()
                else:
                    self._keep((channel, named))

    def _keep(self, early: Joined | None) -> None:
        if self._early is not None:
            self._early[0].close()
        self._early = early

    def _round(self, seconds: float) -> list[Joined]:
        """Waits until somebody comes or speaks, at most some seconds; whoever said for which sync it is."""
        poller = select.poll()
        for each in (self._listener.fileno(), *(channel.fileno() for channel, _ in self._silent)):
            poller.register(each, select.POLLIN)
        spoke = {number for number, _ in poller.poll(min(seconds, POLL_SECONDS) * 1000)}
        for _ in range(AT_ONCE):
            if (channel := self._listener.accept(0)) is None:
                break
            channel.most = JOIN_BYTES
            self._silent.append((channel, time.monotonic() + JOIN_SECONDS))
            spoke.add(channel.fileno())
        joined, waiting, self._silent = [], self._silent, []
        for channel, deadline in waiting:
            try:
                if channel.fileno() in spoke and (named := _heard(channel)) is not None:
                    joined.append((channel, named))
                elif time.monotonic() < deadline:
                    self._silent.append((channel, deadline))
                else:
                    _drop(channel, f"it did not say for which sync it is within {JOIN_SECONDS:g} s")
            except (ChannelClosedError, BadMessageError) as error:
                _drop(channel, error)
        while len(self._silent) > MOST_SILENT:
            _drop(self._silent.pop(0)[0], f"more than {MOST_SILENT} others are silent, too")
        return joined


def _heard(channel: Channel) -> str | None:
    """The sync that a connection is for, ``None`` while it has not said so, or not all of it; never waits.

    Raises:
        ChannelClosedError, BadMessageError: it will not say.
    """
    try:
        join = channel.receive(0)
    except ChannelTimeoutError:
        return None
    if not isinstance(join, Join):
        raise BadMessageError(f"it begins with a {type(join).__name__}")
    channel.most = type(channel).most
    return join.sync_id


def _drop(channel: Channel, why: object) -> None:
    say(f"a connection without a sync was dropped: {why}")
    channel.close()
