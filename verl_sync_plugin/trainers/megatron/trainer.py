# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron training engine, and an adapter of its that the engine serves itself."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from verl_sync_plugin.config.refusals import refuse_megatron_lora
from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend
from verl_sync_plugin.trainers.megatron.bridge import BridgeReader
from verl_sync_plugin.trainers.megatron.model import unwrapped
from verl_sync_plugin.trainers.megatron.source import MegatronLoRASource, MegatronSource
from verl_sync_plugin.trainers.megatron.stream import Guard, Stream, StreamSource


class MegatronTrainer(TrainerBackend):
    """Reads each rank's own parameters through Megatron-Bridge; a model whose conversion computes comes as the bridge's
    own stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = getattr(self.engine, "peft_cls", None) is not None
        self.serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)

    @property
    def layers(self) -> int:
        """``override_transformer_config`` may say otherwise than the checkpoint."""
        return getattr(getattr(self.engine, "tf_config", None), "num_layers", None) or super().layers

    def open_source(self) -> ParameterSource:
        refuse_engine(self.engine)
        policy, chunks, bound = self.policy, self.engine.module, self.config.timeout_seconds
        reader, stream = BridgeReader(self.engine.bridge, chunks, bound), StreamSource(self.stream, policy, bound)
        if self._peft and not self.serves_adapter:
            source = {"chunks": chunks, "reader": reader, "policy": policy, "otherwise": stream}
            return MegatronLoRASource(self.device, bound, **source)
        return MegatronSource(chunks, reader, policy, stream)

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        lora, bound = self.engine.model_config.lora, self.config.timeout_seconds
        return BridgeAdapter(self.engine.module, self._adapter_stream, lora, bound)

    def _adapter_stream(self) -> Stream:
        stream, _ = self.engine.get_per_tensor_param(base_sync_done=True)
        return iter(stream)

    def stream(self, afresh: bool = False) -> Stream:
        """Megatron-Bridge's export; LoRA merged, or left out where the engine serves it. ``afresh``: the last one may
        have been broken off. The bridge's tasks keep what they have heard from other ranks, which may then have heard
        nothing, so new ones are made."""
        if afresh:
            self.engine._hf_export_tasks = None
        stream, _ = self.engine.get_per_tensor_param()
        return ((name.replace(".base_layer.", "."), tensor) for name, tensor, *_ in stream)


class BridgeAdapter(ServedAdapter):
    """The bridge's own export of an adapter, once per sync: the factors are small, and which rows of them belong to
    which HF module is the bridge's knowledge. ``open_stream`` yields the adapter's tensors by HF name; ``lora`` is
    ``actor_rollout_ref.model.lora``."""

    def __init__(
        self, chunks: list[torch.nn.Module], open_stream: Callable[[], Stream], lora: Any, timeout_seconds: float
    ) -> None:
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        self._chunks = chunks
        self._open = open_stream
        self._guard = Guard(timeout_seconds)
        self.settings = build_peft_config_for_vllm(lora)

    def look(self) -> None:
        """Raises ValueError: whatever is trained besides the adapter would stay as it is in the engine."""
        for chunk in map(unwrapped, self._chunks):
            trained = [n for n, p in chunk.named_parameters() if p.requires_grad and p.numel() and ".adapter." not in n]
            if getattr(chunk.config, "moe_router_enable_expert_bias", False):
                trained += [name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")]
            if trained:
                raise ValueError(
                    f"actor_rollout_ref.model.lora.merge=False: {trained[0]!r} changes in training, but is no part of "
                    "the adapter, so the engine would not get it. Set actor_rollout_ref.model.lora.merge=True."
                )

    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        yield
        self._guard.begin(run)
        with self._guard.watching():
            return {f"base_model.model.{name}": tensor.detach() for name, tensor, *_ in self._open()}

    def release(self) -> None:
        """Does nothing: nothing is kept."""


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
