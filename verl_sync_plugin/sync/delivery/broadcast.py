# SPDX-License-Identifier: Apache-2.0
"""Broadcast delivery: where trainer and rollout are apart, every trainer rank sends its segments to all rollout ranks.

For engines on more hosts than send, and for ranks whose GPUs cannot read each other's memory. All ranks keep the same
slots. A trainer rank packs its segment into a slot; one broadcast per segment, from the rank that packed it, completes
the slot everywhere, so every byte is sent once however many engines there are; a rollout rank then has the engine rank
beside it load the slot. A bucket is loaded while the next one is packed and then sent. All ranks settle before the
broadcasts of a bucket, so a rank that has failed leaves nobody alone in one.
"""

from __future__ import annotations

from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.staged import Staged
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.transport.joint import JointRanks


class Broadcast(Staged):
    """See ``Delivery``."""

    name = "broadcast"

    def run(self, sync: Sync) -> None:
        """Sends all buckets, after ``fill``; while one is on its way, the one before it is loaded."""
        count = len(sync.plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                if index >= SLOTS:
                    self._wait(sync, index - SLOTS)
                with sync.report.stage("drain"):
                    self._sender.drain(index % SLOTS)
            self._agreement.settle(f"packing bucket {index + 1} of {count}")
            with self._agreement.attempt(), sync.report.stage("broadcast"):
                self._send(sync, index)
            if index > 0:
                self._arrived(sync, index - 1)
            if index + SLOTS < count:
                self._fill(sync, index + SLOTS)
        if count:
            self._arrived(sync, count - 1)
        with self._agreement.attempt():
            for index in range(max(count - SLOTS, 0), count):
                # Hazard: `_end` waits for the device, which a broadcast to a rank that died keeps busy for ever
                self._sender.drain(index % SLOTS)
                self._wait(sync, index)
        self._end(sync)

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        """Nobody reads a trainer rank's slots; an export that is never opened would keep their memory for good."""
        return (self._me,) if self._loads else ()

    def _send(self, sync: Sync, index: int) -> None:
        """Starts to complete a bucket's slot on all ranks; the bytes are there after ``drain``."""
        ranks = self._agreement.ranks
        assert isinstance(ranks, JointRanks), "trainer and rollout are apart"
        sync.report.handed_over = (sync.plan, index)
        bucket = sync.plan.buckets[index]
        self._sender.broadcast(bucket, index % SLOTS, sync.senders, ranks)
        sync.report.network_bytes += bucket.stride * self._reach.elsewhere(sync.senders[: bucket.world], self._me)

    def _arrived(self, sync: Sync, index: int) -> None:
        """A rollout rank waits for the bytes of a bucket and has them loaded; a trainer rank packs behind them."""
        with self._agreement.attempt():
            if self._loads and not self._agreement.failed:
                self._sender.drain(index % SLOTS)
                self._load(sync, index, index % SLOTS)

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Never called for: an engine rank reads no memory but that of the rollout rank beside it."""
        raise AssertionError("broadcast delivery reads no peer's memory") from error
