# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine, which can be imported only where megatron-core is installed."""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_sync_plugin.config.settings import VENDOR
from verl_sync_plugin.trainers.base import ShardExport


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor=VENDOR)
class SyncMegatronEngineWithLMHead(ShardExport, MegatronEngineWithLMHead):
    """verl's Megatron engine; only its weight export differs."""
