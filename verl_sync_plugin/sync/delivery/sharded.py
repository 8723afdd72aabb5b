# SPDX-License-Identifier: Apache-2.0
"""Sharded delivery: every rank keeps its own segment of a bucket, and engine ranks read from all ranks of a group.

Each reads what it needs, through memory that the ranks of a host share (CUDA IPC over NVLink or PCIe, shared memory on
CPUs). A byte that an engine rank does not need is never moved to it, and what its own trainer rank holds never leaves
the GPU. Nothing is gathered, so no rank waits in a collective of its device. Instead all ranks settle once per bucket:
then every segment of it is packed, and every engine rank has read the bucket before the last, whose slots are free for
the next one. Meanwhile the engines load the last bucket, so the exchange costs them no time.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.staged import Staged
from verl_sync_plugin.sync.sender import SLOTS

AHEAD = SLOTS - 1  # buckets between the one handed over and the last one that every engine rank has surely read
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Sharded(Staged):
    """See ``Delivery``.

    Attributes:
        possible: plans are to be sharded; ``None`` until ``decide``.
    """

    name = "sharded"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.possible: bool | None = None
        self._why = "no ranks share out the model"

    def decide(self, group: dist.ProcessGroup | None) -> None:
        """Collective, once: finds out whether plans are to be sharded.

        Args:
            group: among whose ranks bases are sharded; ``None`` when every rank holds everything.

        Raises:
            SyncError: ``delivery`` is neither ``auto`` nor ``gathered``, and the ranks of a group are on several hosts.
        """
        if self._config.delivery == "gathered":
            self.possible, self._why = False, f"{KEY_PREFIX}.delivery=gathered"
        elif group is None or dist.get_world_size(group) == 1:
            self.possible = False
        else:
            self.possible = self._on_one_host(group)

    def decide_apart(self) -> None:
        """Collective, once, in place of ``decide`` where trainer and rollout are apart: they have to share a host."""
        hosts = self._agreement.gather("finding out which ranks share a host", host_name())
        self._why = f"{KEY_PREFIX}.delivery=broadcast"
        self.possible = self._config.delivery != "broadcast" and len(set(hosts)) == 1
        if not self.possible and self._config.delivery in ("direct", "sharded"):
            raise SyncError(
                f"{KEY_PREFIX}.delivery={self._config.delivery}: trainer and rollout ranks are on several hosts "
                f"({', '.join(sorted(set(hosts)))}). Set it to auto."
            )
        if self._config.delivery != "broadcast":
            self._why = "trainer and rollout ranks are on several hosts"

    def _obstacle(self, sync: Sync) -> str:
        return "" if sync.plan.sharded else self._why

    @property
    def _holds(self) -> bool:
        return self._packs

    def _on_one_host(self, group: dist.ProcessGroup | None) -> bool:
        hosts = self._agreement.gather("finding out which ranks share a host", host_name())
        groups = self._agreement.gather("exchanging groups", tuple(dist.get_process_group_ranks(group)))
        apart = [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]
        if apart and self._config.delivery != "auto":
            raise SyncError(
                f"{KEY_PREFIX}.delivery={self._config.delivery}: trainer ranks {apart[0]}, which share out the model, "
                f"are on several hosts ({', '.join(sorted({hosts[rank] for rank in apart[0]}))}). Set it to auto."
            )
        self._why = "ranks that share out the model are on several hosts"
        return not apart

    def _sources(self, sync: Sync) -> tuple[int, ...]:
        return sync.senders

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        return sync.readers if self._me in sync.senders or not self._apart else ()

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
                f"{KEY_PREFIX}.delivery={self._config.delivery}: an engine rank cannot read other trainer ranks' "
                f"memory ({error}). Set it to auto."
            ) from error
        say(f"an engine rank cannot read other trainer ranks' memory ({error}); buckets are gathered instead")
        self.possible, self._why = False, str(error)


def host_name() -> str:
    """Equal for processes that can share memory: one machine, one container."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()
