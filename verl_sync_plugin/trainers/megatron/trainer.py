# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron training engine."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.config.settings import TURN_OFF, refuse_adapter_mode, refuse_megatron_lora
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend, WirePolicy
from verl_sync_plugin.trainers.megatron.bridge import MegatronBridgeReader
from verl_sync_plugin.trainers.megatron.lora import MegatronLoRASource
from verl_sync_plugin.trainers.megatron.mbridge import MBridgeReader
from verl_sync_plugin.trainers.megatron.source import MegatronSource
from verl_sync_plugin.trainers.megatron.stream import Stream, StreamSource
from verl_sync_plugin.trainers.wire import wire_policy


class MegatronTrainer(TrainerBackend):
    """Reads each rank's own parameters where mbridge converts them, and Megatron-Bridge's export elsewhere."""

    def open_source(self) -> ParameterSource:
        """See ``TrainerBackend``."""
        refuse_engine(self.engine)
        policy = wire_policy(self.config, self.rollout_dtype)
        chunks, bridge = self.engine.module, self.engine.bridge
        if self.engine.vanilla_bridge:
            return MegatronSource(chunks, MBridgeReader(bridge), policy)
        reader, stream = MegatronBridgeReader(bridge, chunks), self._stream_source(policy)
        if self.merges:
            bound = self.config.timeout_seconds
            return MegatronLoRASource(chunks, reader, policy, stream, device=self.device, timeout_seconds=bound)
        return MegatronSource(chunks, reader, policy, stream)

    @property
    def merges(self) -> bool:
        """Whether LoRA adapters are merged into what travels."""
        return getattr(self.engine, "peft_cls", None) is not None and bool(self.engine.model_config.lora.get("merge"))

    def _stream_source(self, policy: WirePolicy) -> StreamSource:
        return StreamSource(self.stream, policy, self.config.timeout_seconds)

    def stream(self, afresh: bool = False) -> Stream:
        """Megatron-Bridge's export, LoRA merged.

        Args:
            afresh: the last one was broken off. The bridge's tasks keep what they have heard from other ranks, which
                may then have heard nothing, so they are made anew.
        """
        if afresh:
            self.engine._hf_export_tasks = None
        stream, _ = self.engine.get_per_tensor_param()
        return iter(stream)


def refuse_engine(engine: Any) -> None:
    """Raises ValueError when a Megatron engine cannot be synced; names key, value and remedy."""
    megatron = "actor_rollout_ref.actor.megatron"
    if getattr(engine, "_qat_enabled", False):
        raise ValueError(f"{megatron}.qat.enable=True: weight sync does not quantize; {TURN_OFF}.")
    if getattr(engine.engine_config, "use_megatron_fsdp", False):
        raise ValueError(f"{megatron}.use_megatron_fsdp=True: weight sync does not read its shards; {TURN_OFF}.")
    if any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in engine.module):
        # Megatron then gathers updated parameters in the next forward pass, which comes after the sync
        raise ValueError(
            f"{megatron}.override_ddp_config.overlap_param_gather=True: the parameters are not up to date when verl "
            "syncs. Set it to False."
        )
    refuse_adapter_mode(engine.model_config)
    refuse_megatron_lora(engine.engine_config, engine.model_config)
