# SPDX-License-Identifier: Apache-2.0
"""Gathered delivery: every rank gathers every bucket, and its engine rank reads all of it beside it.

For ranks whose GPUs cannot read each other's memory, and for a rank that holds the whole model.
"""

from __future__ import annotations

from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.staged import Staged
from verl_sync_plugin.sync.sender import SLOTS


class Gathered(Staged):
    """See ``Delivery``."""

    name = "gathered"

    def run(self, sync: Sync) -> None:
        """Hands all buckets over, after ``fill``, and waits until the engine has loaded them."""
        count = len(sync.plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                with sync.report.stage("gather"):
                    self._sender.drain(index % SLOTS)
                self._load(sync, index, index % SLOTS)
                if index > 0:
                    self._wait(sync, index - 1)
            if 0 < index <= count - SLOTS:
                self._fill(sync, index + SLOTS - 1)
        with self._agreement.attempt():
            if count:
                self._wait(sync, count - 1)
        self._end(sync)

    def _packed(self, sync: Sync, index: int, what: str) -> None:
        """All ranks complete the bucket from their segments."""
        self._agreement.settle(what)
        with self._agreement.attempt(), sync.report.stage("gather"):
            bucket = sync.plan.buckets[index]
            self._sender.gather(bucket, index % SLOTS, sync.rank, sync.source.group)
            if bucket.world > 1:
                sync.report.network_bytes += bucket.stride * self._reach.elsewhere(sync.senders, self._me)

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Never called for: an engine rank reads no other trainer rank's memory."""
        raise AssertionError("gathered delivery reads no peer's memory") from error
