# SPDX-License-Identifier: Apache-2.0
"""verl's training engines, with a weight export that the sharding manager reads shard by shard."""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_sync_plugin.config.settings import VENDOR
from verl_sync_plugin.trainers.base import ShardExport


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor=VENDOR)
class SyncFSDPEngineWithLMHead(ShardExport, FSDPEngineWithLMHead):
    """verl's FSDP engine; only the weight export differs."""
