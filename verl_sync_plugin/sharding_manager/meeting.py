"""How the ranks of a trainer meet the ranks of its engine."""

from __future__ import annotations

import time

from verl_sync_plugin.config import KEY_PREFIX
from verl_sync_plugin.sharding_manager.agreement import Agreement
from verl_sync_plugin.sharding_manager.coverage import say
from verl_sync_plugin.sharding_manager.endpoint import PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.channel import Channel, ChannelClosedError, ChannelTimeoutError, Listener
from verl_sync_plugin.transport.protocol import Join
from verl_sync_plugin.transport.sender import BucketSender

ACCEPT_SECONDS = 1.0
TURN_AWAY_SECONDS = 5.0


class MeetingPoint:
    """This rank's listener, kept as long as the run."""

    def __init__(self) -> None:
        self._listener = Listener()
        self._addresses: tuple[str, ...] | None = None

    def drop_leftovers(self) -> None:
        """Forgets connections of earlier syncs; before the leader may start a load, whose connection is no leftover."""
        self._listener.drop_pending()

    def addresses(self, agreement: Agreement, endpoint: RolloutEndpoint) -> tuple[str, ...]:
        """Where the ranks beside the engine listen, in tensor-parallel order. Collective at the first call."""
        if self._addresses is None:
            everywhere = agreement.gather("exchanging addresses", self._listener.address)
            self._addresses = tuple(everywhere[rank] for rank in endpoint.ranks)
        return self._addresses

    async def connect(
        self, sync_id: str, agreement: Agreement, sender: BucketSender, pending: PendingLoad | None, timeout: float
    ) -> None:
        """Waits for the engine rank in rounds, so that one rank's failure ends the wait of all; collective.

        Args:
            sync_id: what the engine rank must name.
            agreement: where ranks settle.
            sender: adopts the channel.
            pending: the leader's load, which may fail instead.
            timeout: seconds that the engine rank may take.

        Raises:
            SyncError: any rank's engine rank did not come.
        """
        deadline = time.monotonic() + timeout
        channel: Channel | None = None  # also held by the sender once there
        waiting = True
        while waiting:
            with agreement.attempt():
                if channel is None and (channel := self._accept(sync_id)) is not None:
                    sender.adopt(channel)
                if channel is None and pending is not None and pending.finished():
                    await pending.outcome(ACCEPT_SECONDS)
                    raise RuntimeError("SGLang accepted the update but its loader did not connect; see its log")
                if channel is None and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the engine did not connect within {KEY_PREFIX}.timeout_seconds={timeout:g}; see SGLang's log"
                    )
            waiting = agreement.settle("connecting to the engine", waiting=channel is None)

    def turn_away(self) -> None:
        """Lets an engine rank that is on its way to a sync given up find out, instead of waiting for its time limit."""
        if (channel := self._listener.accept(TURN_AWAY_SECONDS)) is not None:
            channel.close()

    def _accept(self, sync_id: str) -> Channel | None:
        """The engine rank's channel of this sync, if it comes within the time of a round; latecomers are closed."""
        channel = self._listener.accept(ACCEPT_SECONDS)
        if channel is None:
            return None
        try:
            if channel.receive(ACCEPT_SECONDS) == Join(sync_id):
                return channel
        except (ChannelClosedError, ChannelTimeoutError) as error:
            say(f"a connection without a sync was dropped: {error}")
        channel.close()
        return None
