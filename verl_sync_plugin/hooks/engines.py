# SPDX-License-Identifier: Apache-2.0
"""verl's training engines, with a weight export that the sharding manager reads shard by shard."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import init_empty_weights
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_sync_plugin.lora.peft import build_peft_model
from verl_sync_plugin.trainers.base import VENDORS, ShardExport


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor=VENDORS)
class SyncFSDPEngineWithLMHead(ShardExport, FSDPEngineWithLMHead):
    """verl's FSDP engine; only the weight export differs, and ``model.lora.peft`` is heard."""

    def _build_lora_module(self, module: torch.nn.Module, **more: Any) -> torch.nn.Module:
        """verl's step that adds the adapter. Raises ValueError where PEFT refuses ``model.lora.peft``."""
        # Where verl loads a model on rank 0 only, FSDP sends the adapter from there as well: no other rank can compute
        # one from the weights that it does not have (PiSSA, OLoRA)
        elsewhere = any(parameter.is_meta for parameter in module.parameters())
        with init_empty_weights() if elsewhere else nullcontext():
            if self.model_config.lora.get("peft", None):
                return build_peft_model(module, self.model_config)
            return super()._build_lora_module(module, **more)
