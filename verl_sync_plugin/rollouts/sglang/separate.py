# SPDX-License-Identifier: Apache-2.0
"""The syncs of a rollout that shares no GPU with the trainer, in verl's process beside an engine rank."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report.file import write_report
from verl_sync_plugin.rollouts.sglang.making import make_separate
from verl_sync_plugin.sync.endpoint import abandon
from verl_sync_plugin.sync.separate.handles import Incoming
from verl_sync_plugin.sync.separate.managers import SeparateRollout


class SeparateReceiver:
    """What the rollout adapter of a separate rollout does for a sync.

    Args:
        adapter: verl's configuration and places of this rank.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._manager: SeparateRollout | None = None

    async def receive(self, incoming: Any, global_steps: int | None) -> None:
        """One sync. Collective over trainer and rollout ranks.

        Args:
            incoming: what the checkpoint engine of this process returned.
            global_steps: verl's weight version.

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        assert isinstance(incoming, Incoming), "of the same backend"
        manager = self._manager_for(incoming)
        try:
            await manager.update_weights([], global_steps)
            await manager.finish([])
        except (SyncError, asyncio.CancelledError) as error:
            await abandon(manager.endpoint, str(error) or repr(error))
            if manager.agreement.lost:
                incoming.membership.lose()
            raise
        await manager.publish()
        if manager.endpoint.leader:
            write_report(manager.report)

    def _manager_for(self, incoming: Incoming) -> SeparateRollout:
        adapter = self._adapter
        if self._manager is not None and incoming.fresh:
            self._manager.close()
        if self._manager is None or incoming.fresh:
            server = ray.get_actor(f"sglang_server_{adapter.replica_rank}_{adapter.node_rank}")
            self._manager = make_separate(incoming, adapter.config, adapter.model_config, server)
        return self._manager
