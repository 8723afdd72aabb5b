"""FSDP and FSDP2 trainers beside SGLang engines."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from verl.utils.model import convert_weight_keys

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.lora.adapters import InUse, carries_adapter, copies_in_use
from verl_sync_plugin.lora.build import unties_embeddings
from verl_sync_plugin.lora.names import is_adapter, merged_name
from verl_sync_plugin.lora.weights import lora_weights, renamed_weights
from verl_sync_plugin.memory.gauges import PeakMemory
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sharding_manager.registry import register_sharding_manager
from verl_sync_plugin.sync.adapter import ADAPTER, AdapterSender
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, WirePolicy
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.lora_source import MergingSource
from verl_sync_plugin.trainers.naming import Rewrite, checkpoint_rewrite
from verl_sync_plugin.trainers.wire import wire_policy


class _FSDPManager(ShardingManager):
    """What both FSDP generations share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = carries_adapter(unwrap(self.engine.module))
        self._copies: dict[str, str | None] = {}
        self._serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)
        # An engine that started from the checkpoint has the base already, and keeps it
        self._base_there = self.endpoint.restores_uncovered and not (self._serves_adapter and self._rewrites_base)
        self._adapter_sender: AdapterSender | None = None

    def open_source(self) -> ParameterSource:
        if getattr(self.engine, "_qat_enabled", False):
            raise ValueError(f"actor.fsdp_config.qat.enable=True: weight sync does not quantize; {TURN_OFF}.")
        if not self._peft:
            return self._plain_source()
        model = unwrap(self.engine.module)
        found = lora_weights(model)
        self._copies = copies_in_use(model)
        if self._serves_adapter:
            self._refuse_served({weight.adapter for weight in found})
        else:
            self._refuse_tied()
        weights = renamed_weights(found, self._rename)
        return MergingSource(
            self._plain_source(),
            weights,
            self._device,
            merge=not self._serves_adapter,
            still=InUse(model).check,
            timeout_seconds=self.config.timeout_seconds,
        )

    async def update_weights(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """One sync; with ``lora.merge=False`` the base only if the engine has none, then the adapter."""
        if not self._serves_adapter:
            return await super().update_weights(wake_tags, global_steps)
        if not self._base_there:
            await super().update_weights(wake_tags, global_steps)
            self._base_there = True
        else:
            self.report = SyncReport(-1 if global_steps is None else int(global_steps), type(self).__name__)
        memory = PeakMemory(self._device)
        with self._agreement.attempt():
            memory.begin()
        with self.report.stage("update_weights"):
            await self._send_adapter(None if global_steps is None else str(global_steps))
        with self._agreement.attempt():
            memory.into(self.report)
        return self.report

    async def _send_adapter(self, version: str | None) -> None:
        with self._agreement.attempt():
            if self._source is None:
                self._source = self.open_source()
            if self._adapter_sender is None:
                assert isinstance(self._source, MergingSource)
                self._adapter_sender = AdapterSender(self._source, self._peft_config, self._policy().dtype, self.config)
        self._agreement.settle("opening the adapter")
        assert self._adapter_sender is not None
        await self._adapter_sender.send(self._agreement, self.endpoint, self.report, version)

    @property
    def _rewrites_base(self) -> bool:
        """PiSSA and its like take what the adapter starts with out of the base: it is no longer the checkpoint's."""
        initial = getattr(self._peft_config, "init_lora_weights", True)
        return initial not in (True, False, "gaussian", "eva", "orthogonal")

    def _refuse_served(self, adapters: set[str]) -> None:
        """Raises ValueError, with key and remedy, for an adapter that the engine cannot serve."""
        if adapters != {ADAPTER} or self._peft_config is None:
            raise ValueError(
                f"actor_rollout_ref.model.lora.merge=False: the engine serves the adapter {ADAPTER!r}, and in use are "
                f"{sorted(adapters)}. Set actor_rollout_ref.model.lora.merge=True, which serves them merged."
            )
        self.endpoint.refuse_adapter(vars(self._peft_config))

    def _refuse_tied(self) -> None:
        """The engine was told at its launch to untie what the adapter changes on one side; see that it was."""
        model: Any = unwrap(self.engine.module)
        config = self.engine.model_config
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        adapted = [type(end).__name__ for end in ends if hasattr(end, "base_layer") or hasattr(end, "modules_to_save")]
        tied = getattr(config.hf_config, "tie_word_embeddings", False)
        saved = all(hasattr(end, "modules_to_save") for end in ends)
        same = saved and getattr(self._peft_config, "ensure_weight_tying", False)
        if adapted and not (tied and same):
            architectures = getattr(config.hf_config, "architectures", None) or ()
            self.endpoint.refuse_untied(architectures, f"the adapter's {adapted[0]}")
        if adapted and tied and not same and not unties_embeddings(config):
            raise ValueError(
                f"the adapter changes the embedding or the head ({', '.join(adapted)}), which this model ties, and the "
                "engine ties them too. Set actor_rollout_ref.model.exclude_modules so that neither is adapted, or with "
                "actor_rollout_ref.actor.strategy=fsdp2, train the embedding whole for both: name it in "
                "+actor_rollout_ref.model.lora.peft.modules_to_save and set "
                "+actor_rollout_ref.model.lora.peft.ensure_weight_tying=True."
            )

    @abstractmethod
    def _plain_source(self) -> ParameterSource:
        """All bases, adapters included."""

    @property
    def _peft_config(self) -> Any:
        """PEFT's config of verl's adapter; ``None`` where it has another name."""
        return (getattr(unwrap(self.engine.module), "peft_config", None) or {}).get(ADAPTER)

    def _policy(self) -> WirePolicy:
        return wire_policy(self.config, self.rollout_dtype)

    @property
    def _hf_model(self) -> Any:
        model: Any = unwrap(self.engine.module)
        return model.get_base_model() if self._peft else model

    def _rewrite(self) -> Rewrite:
        return checkpoint_rewrite(self._hf_model)

    def _unsaved(self) -> frozenset[str]:
        if unties_embeddings(self.engine.model_config):
            return frozenset()  # so does the engine: what was tied travels apart
        return frozenset(getattr(self._hf_model, "all_tied_weights_keys", None) or ())

    def _rename(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._peft:
            named = ((merged_name(name, self._copies), value) for name, value in state.items())
            state = {name: value for name, value in named if name is not None}
        # Adapters never reach the engine under these names, and PEFT's layers know them by their own
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        served = {name: value for name, value in state.items() if name not in adapters}
        return {**convert_weight_keys(served, unwrap(self.engine.module)), **adapters}


@register_sharding_manager(trainer="fsdp2", rollout="sglang")
class FSDP2SGLangShardingManager(_FSDPManager):
    """Reads DTensor shards."""

    trainer = "fsdp2"

    def _plain_source(self) -> ParameterSource:
        return FSDP2Source(self.engine.module, self._policy(), self._rewrite(), self._rename, self._unsaved())


@register_sharding_manager(trainer="fsdp", rollout="sglang")
class FSDPSGLangShardingManager(_FSDPManager):
    """Reads flat-parameter shards."""

    trainer = "fsdp"

    def _plain_source(self) -> ParameterSource:
        return FSDP1Source(self.engine.module, self._policy(), self._rewrite(), self._rename, self._unsaved())


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The HF model inside an FSDP1 wrapper; an FSDP2 module is its own."""
    return getattr(module, "_fsdp_wrapped_module", module)
