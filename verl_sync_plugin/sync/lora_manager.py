# SPDX-License-Identifier: Apache-2.0
"""The phase of a trainer that may hold a LoRA adapter: the engine gets it merged, or serves it itself."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.memory.gauges import PeakMemory
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.adapter import AdapterSender
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource


class LoRAShardingManager(ShardingManager):
    """Without an adapter, and with one that is merged, a ``ShardingManager``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An engine that started from the checkpoint has the base already, and keeps it
        self._base_there = self.endpoint.restores_uncovered and not self.trainer.rewrites_base
        self._adapter_sender: AdapterSender | None = None

    def open_source(self) -> ParameterSource:
        """See ``ShardingManager``; the engine refuses what it could not serve."""
        source = super().open_source()
        if self.trainer.serves_adapter:
            self.endpoint.refuse_adapter(self.trainer.open_adapter(source).settings)
        elif source.prepares and (end := self.trainer.untied_end()):
            self.endpoint.refuse_untied(self.trainer.architectures, f"the adapter's {end}")
        return source

    async def move(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """One sync; with ``lora.merge=False`` the base only if the engine has none, then the adapter."""
        if not self.trainer.serves_adapter:
            return await super().move(wake_tags, global_steps)
        if not self._base_there:
            await super().move(wake_tags, global_steps)
            self._base_there = True
        else:
            self.report = self.new_report(global_steps)
        memory = PeakMemory(self.trainer.device)
        with self.agreement.attempt():
            memory.begin()
        with self.report.stage("update_weights"):
            if self._adapter_sender is None:
                self._adapter_sender = self.agreement.step("opening the adapter", self._open_adapter)
            version = None if global_steps is None else str(global_steps)
            await self._adapter_sender.send(self.agreement, self.endpoint, self.report, version)
        with self.agreement.attempt():
            memory.into(self.report)
        return self.report

    def _open_adapter(self) -> AdapterSender:
        if self.source is None:
            self.source = self.open_source()
        return AdapterSender(self.trainer.open_adapter(self.source), self.trainer.policy.dtype, self.config)
