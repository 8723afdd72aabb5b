"""Megatron trainers beside SGLang engines."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.config.settings import TURN_OFF, refuse_adapter_mode, refuse_megatron_lora
from verl_sync_plugin.sharding_manager.registry import register_sharding_manager
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.trainers.megatron.source import MegatronSource
from verl_sync_plugin.trainers.megatron.stream import Stream, StreamSource
from verl_sync_plugin.trainers.wire import wire_policy


@register_sharding_manager(trainer="megatron", rollout="sglang")
class MegatronSGLangShardingManager(ShardingManager):
    """Reads each rank's own parameters and sends them as they are; the engine gets HF tensors."""

    trainer = "megatron"

    def open_source(self) -> ParameterSource:
        refuse_engine(self.engine)
        policy = wire_policy(self.config, self.rollout_dtype)
        if self.engine.vanilla_bridge:
            return MegatronSource(self.engine.module, self.engine.bridge, policy)
        return StreamSource(self._bridge_stream, policy)

    def _bridge_stream(self) -> Stream:
        """Megatron-Bridge's export, LoRA merged."""
        stream, _ = self.engine.get_per_tensor_param()
        return iter(stream)

    def _agree_on_layout(self) -> None:
        agreement, changed = self._agreement, False
        with agreement.attempt():
            if self._source is None:
                self._source = self.open_source()
            changed = isinstance(self._source, MegatronSource) and self._source.read()
        if not agreement.settle("reading the layout of the trainer", waiting=changed):
            return
        source = self._source
        assert isinstance(source, MegatronSource)
        layouts = agreement.gather("exchanging the layout of the trainer", source.layout)
        with agreement.attempt():
            source.adopt(layouts)
        agreement.settle("matching the layouts of all ranks")
        source.join()


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
