# SPDX-License-Identifier: Apache-2.0
"""The syncs of a rollout that shares no GPU with the trainer, in verl's process beside an engine rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from verl_sync_plugin.report import write_report
from verl_sync_plugin.sync.separate.handles import Incoming
from verl_sync_plugin.sync.separate.managers import SeparateRollout


class SeparateReceiver:
    """What the rollout adapter of a separate rollout does for a sync.

    Args:
        make: makes the manager; called again whenever trainer and rollout ranks have become others.
    """

    def __init__(self, make: Callable[[Incoming], SeparateRollout]) -> None:
        self._make = make
        self._manager: SeparateRollout | None = None
        self._one = asyncio.Lock()

    async def receive(self, incoming: Any, global_steps: int | None) -> None:
        """One sync. Collective over trainer and rollout ranks.

        Args:
            incoming: what the checkpoint engine of this process returned.
            global_steps: verl's weight version.

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        assert isinstance(incoming, Incoming), "of the same backend"
        async with self._one:  # a sync that has failed ends before the next one begins
            await self._receive(incoming, global_steps)

    async def _receive(self, incoming: Incoming, global_steps: int | None) -> None:
        with incoming.membership.taking_part():
            manager = self._manager_for(incoming)
            await manager.update_weights([], global_steps)
            await manager.finish([])
        await manager.publish()
        if manager.endpoint.leader:
            write_report(manager.report)

    def _manager_for(self, incoming: Incoming) -> SeparateRollout:
        before = self._manager
        if before is not None and before.agreement.ranks is incoming.ranks:
            return before
        self._manager = None
        if before is not None:
            before.close()
        manager = self._make(incoming)
        if before is not None:
            manager.take_over(before)
        self._manager = manager
        return manager
