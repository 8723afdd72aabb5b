# SPDX-License-Identifier: Apache-2.0
"""Megatron trainers beside SGLang engines."""

from __future__ import annotations

from verl_sync_plugin.sharding_manager.registry import register_sharding_manager
from verl_sync_plugin.sync.lora_manager import LoRAShardingManager
from verl_sync_plugin.trainers.megatron.trainer import MegatronTrainer


@register_sharding_manager(trainer="megatron", rollout="sglang")
class MegatronSGLangShardingManager(LoRAShardingManager):
    """Each rank sends its own parameters as they are, and the engine gets HF tensors."""

    backend = MegatronTrainer
