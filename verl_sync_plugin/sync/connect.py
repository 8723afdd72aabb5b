# SPDX-License-Identifier: Apache-2.0
"""Connects trainer ranks and engine ranks: the load is asked for, awaited, or given up.

Every sync has a socket of its own on every rank, named by a secret of the rank and the sync's number, and bound one
sync ahead: an engine rank of the next sync may come before its trainer rank has begun that, and one of a sync that was
given up is refused at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.sync.endpoint import PendingLoad, RolloutEndpoint, abandon, leave
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import PeersUnreachableError
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.channel import Channel, Greeting, Listener
from verl_sync_plugin.transport.protocol import LoadRequest

ACCEPT_SECONDS = 1.0


class MeetingPoint:
    """This rank's sockets, and the engine's load of the sync under way.

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
        self._secret = secrets.token_hex(16)
        self._secrets: tuple[str, ...] | None = None  # of the trainer ranks next to the engine's
        self._number = 0  # of the sync under way; the same on all ranks
        self._sync_id = ""
        self._listener: Listener | None = None
        self._next: Listener | None = self._listen(1)
        self.pending: PendingLoad | None = None

    def _listen(self, number: int) -> Listener:
        return Listener(self._config.timeout_seconds, _address(self._secret, number))

    def begin(self, sync_id: str) -> None:
        """A new sync, of which nothing is asked yet. All ranks begin the same.

        Args:
            sync_id: what it is called in messages; other than all before.
        """
        self._part()
        self._number, self._sync_id, self.pending = self._number + 1, sync_id, None
        with self._agreement.attempt():
            self._listener, self._next = self._next or self._listen(self._number), None
            self._next = self._listen(self._number + 1)

    def ask(self, weight_version: str | None) -> None:
        """Has the engine start to load; collective at the first call.

        On the leader the engine has the request when this returns, unless this rank has failed: it may still be asleep.

        Args:
            weight_version: see ``RolloutEndpoint.start_load``.
        """
        if self._secrets is None:
            everywhere = self._agreement.gather("exchanging addresses", self._secret)
            self._secrets = tuple(everywhere[rank] for rank in self._endpoint.ranks)
        with self._agreement.attempt():
            if self._endpoint.leader and not self._agreement.failed:
                addresses = tuple(_address(secret, self._number) for secret in self._secrets)
                request = LoadRequest(self._sync_id, addresses, self._config.timeout_seconds)
                self.pending = self._endpoint.start_load(request, weight_version)

    async def meet(self, greet: Callable[[], Greeting]) -> Greeting:
        """Waits for the engine rank in rounds, so that one rank's failure ends the wait of all, and greets it;
        collective.

        Args:
            greet: opens the sync on the channel that the sender has adopted.

        Returns:
            The result of ``greet``; an empty one where this rank has no engine rank.

        Raises:
            SyncError: any rank's engine rank did not come, or failed.
            PeersUnreachableError: an engine rank cannot read other trainer ranks' memory; nothing was loaded.
        """
        seconds, name = self._config.timeout_seconds, self._endpoint.name
        deadline, greeting = time.monotonic() + seconds, Greeting("", None)
        missing = bool(self._endpoint.ranks)  # the engine rank, where this rank has one
        waiting, again, unreachable = 1, False, 0
        while waiting:
            with self._agreement.attempt():
                if missing and not self._agreement.failed and (channel := self._accept()) is not None:
                    self._sender.adopt(channel)
                    missing = False
                    greeting = greet()
                if missing or again:
                    await self._look_at_load()
                if missing and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the engine did not connect within {KEY_PREFIX}.timeout_seconds={seconds:g}; see {name}'s log"
                    )
            votes = [int(missing), int(bool(greeting.unreachable))]
            waiting, unreachable = self._agreement.vote("connecting to the engine", votes).tolist()
            again = True
        if unreachable:
            texts = self._agreement.gather("asking why memory is out of reach", greeting.unreachable)
            raise PeersUnreachableError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
        with self._agreement.attempt():
            if self._endpoint.leader:
                self._endpoint.flush_behind_load()
        return greeting

    async def _look_at_load(self) -> None:
        """Called while an engine rank is awaited on any rank; only the leader has a load to look at.

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
        self._part()
        if self._next is not None:
            self._next.close()

    def _part(self) -> None:
        self._sender.hang_up()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self) -> Channel | None:
        """The engine rank's channel of this sync, if it comes within the time of a round."""
        assert self._listener is not None, "begun"
        channel = self._listener.accept(ACCEPT_SECONDS)
        if channel is not None:
            self._listener.close()
        return channel


def _address(secret: str, number: int) -> str:
    return f"@verl-sync-{secret}-{number}"
