# SPDX-License-Identifier: Apache-2.0
"""Sharded delivery: every rank keeps its own segment of a bucket, and engine ranks read from all ranks of a group.

Each reads what it needs, through memory that the ranks of a host share (CUDA IPC over NVLink or PCIe, shared memory on
CPUs). A byte that an engine rank does not need is never moved to it, and what its own trainer rank holds never leaves
the GPU. Nothing is gathered, so no rank waits in a collective of its device. Instead all ranks settle once per bucket:
then every segment of it is packed, and every engine rank has read the bucket before the last, whose slots are free for
the next one. Meanwhile the engines load the last bucket, so the exchange costs them no time.
"""

from __future__ import annotations

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.staged import Staged
from verl_sync_plugin.sync.sender import SLOTS

AHEAD = SLOTS - 1  # buckets between the one handed over and the last one that every engine rank has surely read


class Sharded(Staged):
    """See ``Delivery``."""

    name = "sharded"

    def _obstacle(self, sync: Sync) -> str:
        return "" if sync.plan.sharded and not self._reach.several else self._reach.why_sharded

    @property
    def _holds(self) -> bool:
        return self._packs

    def _sources(self, sync: Sync) -> tuple[int, ...]:
        return sync.senders

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        return sync.readers if self._me in sync.senders or not self._apart else ()

    def _homes(self, sync: Sync) -> tuple[tuple[int, int], ...]:
        return tuple((segment, 0) for segment in range(len(sync.senders)))

    def run(self, sync: Sync) -> None:
        """Hands all buckets over, after ``fill``; each may be read by all engine ranks of the group."""
        count = len(sync.plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                if index >= AHEAD:
                    self._wait(sync, index - AHEAD)
                with sync.report.stage("drain"):
                    self._sender.drain(index % SLOTS)
            with sync.report.stage("settle"):
                self._agreement.settle(f"packing bucket {index + 1} of {count}")
            with self._agreement.attempt():
                self._load(sync, index, index % SLOTS)
            if AHEAD <= index < count - 1:
                self._fill(sync, index + 1)
        with self._agreement.attempt():
            for index in range(max(count - AHEAD, 0), count):
                self._wait(sync, index)
        self._end(sync)

    def fall_back(self, error: PeersUnreachableError) -> None:
        if self._config.delivery != "auto":
            raise SyncError(
                f"{KEY_PREFIX}.delivery={self._config.delivery}: an engine rank cannot read other ranks' "
                f"memory ({error}). Set it to auto."
            ) from error
        instead = "broadcast" if self._apart else "gathered"
        say(f"an engine rank cannot read other ranks' memory ({error}); buckets are {instead} instead")
        self._reach.lose(str(error))
