# SPDX-License-Identifier: Apache-2.0
"""The phase of a script's syncs: that of every colocated run, over the model that the script trains."""

from __future__ import annotations

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.lora_manager import LoRAShardingManager
from verl_sync_plugin.trainers.live import Live, LiveTrainer
from verl_sync_plugin.transport.agreement import Agreement


class SpmdShardingManager(LoRAShardingManager):
    """Reads whatever ``Live`` holds.

    Args:
        live: the model of the script.
        agreement: of all its ranks.
        endpoint, config, bucket_bytes, device, dtype: see ``ShardingManager``.
    """

    backend = LiveTrainer

    def __init__(
        self,
        live: Live,
        agreement: Agreement,
        endpoint: RolloutEndpoint,
        config: SyncConfig,
        bucket_bytes: int,
        device: torch.device,
        dtype: str,
    ) -> None:
        self._given = agreement
        super().__init__(live, endpoint, config, bucket_bytes, device, dtype)

    def _agree(self) -> Agreement:
        return self._given

    def begin_anew(self) -> None:
        """Another model is there: what is known of the last one's layout is forgotten. On all ranks alike."""
        self.source = None
