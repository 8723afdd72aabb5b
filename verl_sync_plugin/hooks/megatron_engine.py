# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine, with a weight export that the sharding manager reads shard by shard."""

from __future__ import annotations

from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_sync_plugin.trainers import shard_stream
from verl_sync_plugin.trainers.shard_stream import VENDORS, ShardStream, WeightStream


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor=VENDORS)
class SyncMegatronEngineWithLMHead(MegatronEngineWithLMHead):
    """verl's Megatron engine; only its weight export differs."""

    def get_per_tensor_param(self, base_sync_done: bool = False, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        """verl's contract: ``(weight stream, adapter config or None)``. Moves nothing when the plugin is on: offloaded
        parameters stay in host memory and are read there."""
        stock = super().get_per_tensor_param
        if not shard_stream.taken_over():
            return stock(base_sync_done=base_sync_done, **kwargs)

        def stock_stream() -> WeightStream:
            stream, _ = stock(base_sync_done=base_sync_done, **kwargs)
            return stream

        return ShardStream(self, stock_stream), None
