# SPDX-License-Identifier: Apache-2.0
"""The phase of a trainer that may hold a LoRA adapter: the engine gets it merged, or serves it itself."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.memory import PeakMemory
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.adapter import AdapterSender
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource


class LoRAShardingManager(ShardingManager):
    """Without an adapter, and with one that is merged, a ``ShardingManager``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._base_sent = False
        self._adapter_sender: AdapterSender | None = None

    def open_source(self) -> ParameterSource:
        """See ``ShardingManager``; the engine refuses what it could not serve."""
        source = super().open_source()
        self.refuse_unservable(source)
        return source

    def refuse_unservable(self, source: ParameterSource) -> None:
        """Raises ValueError when the engine cannot serve the trainer's adapter, or hold what it is merged into."""
        if self.trainer.serves_adapter:
            self.endpoint.refuse_adapter(self.trainer.open_adapter(source).settings)
        elif source.prepares and (end := self.trainer.untied_end()):
            self.endpoint.refuse_untied(self.trainer.architectures, f"the adapter's {end}")

    async def move(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """One sync; with ``lora.merge=False`` the base once, then the adapter."""
        if not self.serves_adapter():
            return await super().move(wake_tags, global_steps)
        if self.lacks_base():
            self._base_sent = False
            await super().move(wake_tags, global_steps)
            self._base_sent = True
        else:
            self.report = self.new_report(global_steps)
        memory = PeakMemory(self._device)
        with self.agreement.attempt():
            memory.begin()
        with self.report.stage("update_weights"):
            await self.send_adapter(None if global_steps is None else str(global_steps))
        with self.agreement.attempt():
            memory.into(self.report)
        return self.report

    def serves_adapter(self) -> bool:
        """Whether the engine serves the trainer's adapter itself; the same on all ranks."""
        return self.trainer.serves_adapter

    def lacks_base(self) -> bool:
        """Whether the base has to travel before the adapter; the same on all ranks.

        To an engine that began with the checkpoint, too: a sync proves what it holds, its own load does not.
        """
        return not self._base_sent

    async def send_adapter(self, version: str | None) -> None:
        """The factors, into the engine. Collective.

        Raises:
            SyncError: any rank or engine failed; the same text on every rank.
        """
        if self._adapter_sender is None:
            self._adapter_sender = self.agreement.step("opening the adapter", self.open_adapter)
        await self._adapter_sender.send(self.agreement, self.endpoint, self.report, version)

    def open_adapter(self) -> AdapterSender:
        """Once, on a rank that has a trainer."""
        if self.source is None:
            self.source = self.open_source()
        return AdapterSender(self.trainer.open_adapter(self.source), self.trainer.policy.dtype, self.config)
