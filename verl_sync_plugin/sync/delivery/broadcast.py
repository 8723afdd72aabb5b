# SPDX-License-Identifier: Apache-2.0
"""Broadcast delivery: where trainer and rollout are apart, every trainer rank sends its segments to all rollout ranks.

For engines on more hosts than send, and for ranks whose GPUs cannot read each other's memory. All ranks keep the same
slots. A trainer rank packs its segment into a slot; one broadcast per segment, from the rank that packed it, completes
the slot everywhere, so every byte is sent once however many engines there are; a rollout rank then has the engine rank
beside it load the slot.
"""

from __future__ import annotations

from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.sending import Sending
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.transport.joint import JointRanks


class Broadcast(Sending):
    """See ``Delivery``."""

    name = "broadcast"
    shared = False

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        """Nobody reads a trainer rank's slots; an export that is never opened would keep their memory for good."""
        return (self._me,) if self._loads else ()

    def _send(self, sync: Sync, index: int) -> None:
        """Starts to complete a bucket's slot on all ranks."""
        ranks = self._agreement.ranks
        assert isinstance(ranks, JointRanks), "trainer and rollout are apart"
        bucket = sync.plan.buckets[index]
        self._sender.broadcast(bucket, index % SLOTS, sync.senders, ranks)
        sync.report.network_bytes += bucket.stride * self._reach.elsewhere(sync.senders[: bucket.world], self._me)

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Never called for: an engine rank reads no memory but that of the rollout rank beside it."""
        raise AssertionError("broadcast delivery reads no peer's memory") from error
