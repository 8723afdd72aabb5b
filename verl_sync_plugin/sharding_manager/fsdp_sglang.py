# SPDX-License-Identifier: Apache-2.0
"""FSDP and FSDP2 trainers beside SGLang engines."""

from __future__ import annotations

from verl_sync_plugin.sharding_manager.registry import register_sharding_manager
from verl_sync_plugin.sync.lora_manager import LoRAShardingManager
from verl_sync_plugin.trainers.fsdp import FSDP1Trainer, FSDP2Trainer


@register_sharding_manager(trainer="fsdp2", rollout="sglang")
class FSDP2SGLangShardingManager(LoRAShardingManager):
    """DTensor shards."""

    backend = FSDP2Trainer


@register_sharding_manager(trainer="fsdp", rollout="sglang")
class FSDPSGLangShardingManager(LoRAShardingManager):
    """Flat-parameter shards."""

    backend = FSDP1Trainer
