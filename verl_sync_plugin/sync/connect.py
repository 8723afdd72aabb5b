# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a trainer meet the ranks of its engine: the load is asked for, awaited, or given up."""

from __future__ import annotations

import asyncio
import time

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.sync.arrivals import Arrivals
from verl_sync_plugin.sync.endpoint import PendingLoad, RolloutEndpoint, abandon, leave
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.channel import Channel
from verl_sync_plugin.transport.listener import Listener
from verl_sync_plugin.transport.protocol import LoadRequest

ACCEPT_SECONDS = 1.0


class MeetingPoint:
    """This rank's listener, kept as long as the run, and the engine's load of the sync under way.

    Args:
        agreement: where ranks settle.
        endpoint: the engine.
        sender: adopts the channel to the engine rank.
        config: bounds the time that an engine rank may take to come.

    Attributes:
        pending: the leader's load of the sync under way.
    """

    def __init__(
        self, agreement: Agreement, endpoint: RolloutEndpoint, sender: BucketSender, config: SyncConfig
    ) -> None:
        self._agreement = agreement
        self._endpoint = endpoint
        self._sender = sender
        self._config = config
        self._listener = Listener(config.timeout_seconds)
        self._arrivals = Arrivals(self._listener)
        self._addresses: tuple[str, ...] | None = None
        self._sync_id = ""
        self._expected = False  # an engine rank is on its way, for all that this rank knows
        self.pending: PendingLoad | None = None

    def begin(self, sync_id: str) -> None:
        """A new sync, of which nothing is asked yet.

        Args:
            sync_id: what the engine ranks must name; other than all before.
        """
        self._sync_id, self._expected, self.pending = sync_id, False, None

    def ask(self, weight_version: str | None) -> None:
        """Has the engine start to load; collective at the first call.

        On the leader the engine has the request when this returns, also when this rank has failed before: the others
        expect their engine ranks already.

        Args:
            weight_version: see ``RolloutEndpoint.start_load``.
        """
        self._arrivals.stop()
        if self._addresses is None:
            everywhere = self._agreement.gather("exchanging addresses", self._listener.address)
            self._addresses = tuple(everywhere[rank] for rank in self._endpoint.ranks)
        self._expected = bool(self._endpoint.ranks)
        with self._agreement.attempt():
            if self._endpoint.leader:
                request = LoadRequest(self._sync_id, self._addresses, self._config.timeout_seconds)
                self.pending = self._endpoint.start_load(request, weight_version)

    async def meet(self) -> None:
        """Waits for the engine rank in rounds, so that one rank's failure ends the wait of all; collective.

        Raises:
            SyncError: any rank's engine rank did not come.
        """
        seconds, name = self._config.timeout_seconds, self._endpoint.name
        deadline = time.monotonic() + seconds
        missing = bool(self._endpoint.ranks)  # the engine rank, where there is one beside this rank
        waiting, again = True, False
        while waiting:
            with self._agreement.attempt():
                if missing and (channel := self._accept()) is not None:
                    self._sender.adopt(channel)
                    missing = False
                if missing or again:
                    await self._look_at_load()
                if missing and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the engine did not connect within {KEY_PREFIX}.timeout_seconds={seconds:g}; see {name}'s log"
                    )
            waiting = again = self._agreement.settle("connecting to the engine", waiting=missing)
        with self._agreement.attempt():
            if self._endpoint.leader:
                self._endpoint.flush_behind_load()

    async def _look_at_load(self) -> None:
        """Of the leader, while an engine rank is awaited on any rank.

        Raises:
            RuntimeError: none will come, for the load has ended.
        """
        if self.pending is None:
            return
        if self.pending.finished():
            await self.pending.outcome(ACCEPT_SECONDS)
            name = self._endpoint.name
            raise RuntimeError(f"{name} accepted the update but its loader did not connect; see {name}'s log")

    async def give_up(self, why: str) -> None:
        """Ends the sync whatever its state: the engine leaves the load, and generates nothing until one succeeds.

        Args:
            why: the failure.
        """
        self._part()
        # Side by side: a server that is silent costs one bound, not two
        await asyncio.gather(abandon(self._endpoint, why), leave(self.pending, self._config.timeout_seconds))

    async def leave(self) -> None:
        """Ends a load of which nothing was loaded; returns when the leader's engine is ready for another one."""
        self._part()
        await leave(self.pending, self._config.timeout_seconds)

    def close(self) -> None:
        """Nobody comes here any more."""
        self._arrivals.stop()
        self._listener.close()

    def _part(self) -> None:
        self._sender.hang_up()
        if self._expected:
            self._expected = False
            self._arrivals.turn_away(self._sync_id)

    def _accept(self) -> Channel | None:
        """The engine rank's channel of this sync, if it comes within the time of a round."""
        channel = self._arrivals.take(self._sync_id, ACCEPT_SECONDS)
        self._expected = channel is None
        return channel
