"""FSDP and FSDP2 trainers beside SGLang engines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from verl.utils.model import convert_weight_keys

from verl_sync_plugin.config import KEY_PREFIX, TURN_OFF, refuse_adapter_mode
from verl_sync_plugin.lora.build import unties_embeddings
from verl_sync_plugin.lora.names import merged_name
from verl_sync_plugin.lora.weights import lora_weights, renamed_weights
from verl_sync_plugin.sharding_manager.base import ShardingManager
from verl_sync_plugin.sharding_manager.registry import register_sharding_manager
from verl_sync_plugin.source.base import ParameterSource, WirePolicy
from verl_sync_plugin.source.fsdp1 import FSDP1Source
from verl_sync_plugin.source.fsdp2 import FSDP2Source
from verl_sync_plugin.source.lora import MergingSource
from verl_sync_plugin.source.naming import Rewrite, verl_rewrite


class _FSDPManager(ShardingManager):
    """What both FSDP generations share."""

    def open_source(self) -> ParameterSource:
        if getattr(self.engine, "_qat_enabled", False):
            raise ValueError(f"actor.fsdp_config.qat.enable=True: weight sync does not quantize; {TURN_OFF}.")
        if not self._peft:
            return self._plain_source()
        refuse_adapter_mode(self.engine.model_config)
        self._refuse_tied()
        weights = renamed_weights(lora_weights(unwrap(self.engine.module)), self._rename)
        return MergingSource(self._plain_source(), weights, self._device)

    def _refuse_tied(self) -> None:
        """The engine was told at its launch to untie what the adapter changes on one side; see that it was."""
        model: Any = unwrap(self.engine.module)
        config = self.engine.model_config
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        adapted = [type(end).__name__ for end in ends if hasattr(end, "base_layer") or hasattr(end, "modules_to_save")]
        tied = getattr(config.hf_config, "tie_word_embeddings", False)
        same = getattr(model.peft_config["default"], "ensure_weight_tying", False)
        if adapted and tied and not same and not unties_embeddings(config):
            raise ValueError(
                f"the adapter changes the embedding or the head ({', '.join(adapted)}), which this model ties, and the "
                "engine ties them too. Set actor_rollout_ref.model.exclude_modules so that neither is adapted, or "
                "+actor_rollout_ref.model.lora.peft.ensure_weight_tying=True."
            )

    @abstractmethod
    def _plain_source(self) -> ParameterSource:
        """All bases, adapters included."""

    @property
    def _peft(self) -> bool:
        return hasattr(unwrap(self.engine.module), "peft_config")

    def _policy(self) -> WirePolicy:
        name = self.config.wire_dtype
        if name == "auto":
            name = self.rollout_dtype
        dtype = getattr(torch, {"half": "float16", "float": "float32"}.get(name, name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"actor_rollout_ref.rollout.dtype={name!r}: not a torch dtype. Set {KEY_PREFIX}.wire_dtype=bfloat16."
            )
        return WirePolicy(dtype, self.config.keep_dtype)

    def _rewrite(self) -> Rewrite:
        return verl_rewrite(self.engine.model_config.hf_config.model_type)

    def _rename(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._peft:
            named = ((merged_name(name), value) for name, value in state.items())
            state = {name: value for name, value in named if name is not None}
        return convert_weight_keys(state, unwrap(self.engine.module))


@register_sharding_manager(trainer="fsdp2", rollout="sglang")
class FSDP2SGLangShardingManager(_FSDPManager):
    """Reads DTensor shards."""

    trainer = "fsdp2"

    def _plain_source(self) -> ParameterSource:
        module = self.engine.module
        parameters = set(self._rename(dict(module.named_parameters(remove_duplicate=False))))

        def state_dict() -> Mapping[str, torch.Tensor]:
            return self._rename(module.state_dict())

        return FSDP2Source(state_dict, parameters, self._policy(), self._rewrite())


@register_sharding_manager(trainer="fsdp", rollout="sglang")
class FSDPSGLangShardingManager(_FSDPManager):
    """Reads flat-parameter shards."""

    trainer = "fsdp"

    def _plain_source(self) -> ParameterSource:
        return FSDP1Source(self.engine.module, self._policy(), self._rewrite(), self._rename)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The HF model inside an FSDP1 wrapper; an FSDP2 module is its own."""
    return getattr(module, "_fsdp_wrapped_module", module)
