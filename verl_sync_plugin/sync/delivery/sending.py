# SPDX-License-Identifier: Apache-2.0
"""What the deliveries share whose buckets are sent to other ranks: packing, sending and loading run at once.

All ranks settle once per bucket. Then this bucket is packed everywhere and the one before the last has been read
everywhere, so its slot is free. While one bucket is on its way, the one before it is loaded and the one behind it is
packed. A rank that has failed says so there, before anything is sent, so nobody waits for its bytes; and what is on its
way is awaited before a rank gives up, so that nothing of a failed sync comes into a later one.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from typing import ClassVar

from verl_sync_plugin.errors import RankLostError, SyncError
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.sharded import AHEAD
from verl_sync_plugin.sync.delivery.staged import Staged
from verl_sync_plugin.sync.sender import SLOTS


class Sending(Staged):
    """See ``Delivery``.

    Attributes:
        shared: engine ranks read what has come to other ranks, so all ranks hear that a bucket has arrived before any
            of them loads it; else each awaits its own, when the next bucket is on its way already.
    """

    shared: ClassVar[bool]

    @abstractmethod
    def _send(self, sync: Sync, index: int) -> None:
        """Collective: starts to send a bucket that all ranks have packed; it has arrived behind the sender's
        ``drain``."""

    def run(self, sync: Sync) -> None:
        """Hands all buckets over, after ``fill``."""
        try:
            self._run(sync)
        except RankLostError:
            raise  # what is on its way from that rank never comes
        except BaseException as error:
            for slot in range(SLOTS):
                with suppress(Exception):
                    self._sender.drain(slot)
            if isinstance(error, SyncError):
                # All ranks raise it, and none goes on to end its transfers before all have awaited theirs
                with suppress(SyncError):
                    self._agreement.settle("awaiting what was on its way")
            raise

    def _run(self, sync: Sync) -> None:
        count = len(sync.plan.buckets)
        for index in range(count + 1):
            with self._agreement.attempt():
                if index >= AHEAD:
                    self._wait(sync, index - AHEAD)
            with self._agreement.attempt(), sync.report.stage("drain"):
                if index < count:
                    self._sender.drain(index % SLOTS)
            if self.shared:
                self._await(sync, index - 1)
            with sync.report.stage("settle"):
                self._agreement.settle(f"sending bucket {max(index, 1)} of {count}")
            with self._agreement.attempt():
                if index < count:
                    self._send(sync, index)
            if not self.shared:
                self._await(sync, index - 1)
            with self._agreement.attempt():
                if index > 0 and not self._agreement.failed:
                    self._load(sync, index - 1, (index - 1) % SLOTS)
            if AHEAD <= index < count - 1:
                self._fill(sync, index + 1)
        with self._agreement.attempt():
            if count:
                self._wait(sync, count - 1)
        self._end(sync)

    def _await(self, sync: Sync, index: int) -> None:
        """A bucket has arrived on this rank, and what this rank sent of it has left."""
        with self._agreement.attempt(), sync.report.stage("exchange"):
            if index >= 0:
                self._sender.drain(index % SLOTS)
