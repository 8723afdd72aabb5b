# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron training engine."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.config.refusals import refuse_megatron_lora
from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend
from verl_sync_plugin.trainers.megatron.bridge import MegatronBridgeReader
from verl_sync_plugin.trainers.megatron.lora import MegatronLoRASource
from verl_sync_plugin.trainers.megatron.served import BridgeAdapter
from verl_sync_plugin.trainers.megatron.source import MegatronSource
from verl_sync_plugin.trainers.megatron.stream import Stream, StreamSource


class MegatronTrainer(TrainerBackend):
    """Reads each rank's own parameters through Megatron-Bridge; a model whose conversion computes comes as the bridge's
    own stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = getattr(self.engine, "peft_cls", None) is not None
        self.serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)

    @property
    def layers(self) -> int:
        """See ``TrainerBackend``; ``override_transformer_config`` may say otherwise than the checkpoint."""
        return getattr(getattr(self.engine, "tf_config", None), "num_layers", None) or super().layers

    def open_source(self) -> ParameterSource:
        """See ``TrainerBackend``."""
        refuse_engine(self.engine)
        policy, chunks, bridge = self.policy, self.engine.module, self.engine.bridge
        bound = self.config.timeout_seconds
        reader, stream = MegatronBridgeReader(bridge, chunks, bound), StreamSource(self.stream, policy, bound)
        if self._peft and not self.serves_adapter:
            return MegatronLoRASource(chunks, reader, policy, stream, device=self.device, timeout_seconds=bound)
        return MegatronSource(chunks, reader, policy, stream)

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        """See ``TrainerBackend``."""
        lora, bound = self.engine.model_config.lora, self.config.timeout_seconds
        return BridgeAdapter(self.engine.module, self._adapter_stream, lora, bound)

    def _adapter_stream(self) -> Stream:
        stream, _ = self.engine.get_per_tensor_param(base_sync_done=True)
        return iter(stream)

    def stream(self, afresh: bool = False) -> Stream:
        """Megatron-Bridge's export; LoRA merged, or left out where the engine serves it.

        Args:
            afresh: the last one may have been broken off. The bridge's tasks keep what they have heard from other
                ranks, which may then have heard nothing, so they are made anew.
        """
        if afresh:
            self.engine._hf_export_tasks = None
        stream, _ = self.engine.get_per_tensor_param()
        return ((name.replace(".base_layer.", "."), tensor) for name, tensor, *_ in stream)


def refuse_engine(engine: Any) -> None:
    """Raises ValueError when a Megatron engine cannot be synced; names key, value and remedy."""
    megatron = "actor_rollout_ref.actor.megatron"
    if engine.vanilla_bridge:
        raise ValueError(
            f"{megatron}.vanilla_mbridge=True: weight sync serves Megatron-Bridge, verl's default, and not the "
            f"deprecated mbridge. Set it to False, or {TURN_OFF}."
        )
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
    refuse_megatron_lora(engine.engine_config, engine.model_config)
