# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP and FSDP2 training engines, with or without a PEFT adapter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import torch
from verl.utils.model import convert_weight_keys

from verl_sync_plugin.config.refusals import ACTOR, NO_QAT
from verl_sync_plugin.config.settings import MODEL, TURN_OFF
from verl_sync_plugin.layout.tensors import clean_name
from verl_sync_plugin.lora.peft import ADAPTER, Adapters, adapter_of, carries_adapter, is_adapter, merged_name
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.lora import TRAINED, MergingSource, refuse_unserved
from verl_sync_plugin.trainers.naming import Naming, checkpoint_rewrite, unsaved_of


class FSDPTrainer(TrainerBackend):
    """Both FSDP generations; ``reader`` yields all bases, adapters included."""

    reader: ClassVar[type[FSDP1Source] | type[FSDP2Source]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = carries_adapter(self._model)
        # PEFT's config of verl's adapter; ``None`` where it has another name
        self.adapter_config = (getattr(self._model, "peft_config", None) or {}).get(ADAPTER)
        self.serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)

    @property
    def _model(self) -> Any:
        """The HF model inside an FSDP1 wrapper; an FSDP2 module is its own."""
        return getattr(self.engine.module, "_fsdp_wrapped_module", self.engine.module)

    def open_source(self) -> ParameterSource:
        if getattr(self.engine, "_qat_enabled", False):
            raise ValueError(f"{ACTOR}.fsdp_config.qat.enable=True: {NO_QAT}; {TURN_OFF}.")
        if not self._peft:
            return self._plain_source()
        found = Adapters(self._model, self._rename)
        adapters = {weight.adapter for weight in found.weights.values()}
        if self.serves_adapter and (adapters != {ADAPTER} or self.adapter_config is None):
            why = f"the engine serves the adapter {ADAPTER!r}, and in use are {sorted(adapters)}"
            raise ValueError(f"{MODEL}.lora.merge=False: {why}. Set {MODEL}.lora.merge=True, which serves them merged.")
        bound, merges = self.config.timeout_seconds, not self.serves_adapter
        return MergingSource(self._plain_source(), found, self.device, bound, merges)

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        assert isinstance(source, MergingSource), "an adapter is served"
        return PEFTAdapter(source, self.adapter_config, self._model)

    def _plain_source(self) -> ParameterSource:
        model = self._model.get_base_model() if self._peft else self._model
        naming = Naming(self.policy, checkpoint_rewrite(model), self._rename, unsaved_of(model))
        return self.reader(self.engine.module, naming)

    def _rename(self, state: dict[str, Any]) -> dict[str, Any]:
        state = {clean_name(name): value for name, value in state.items()}
        if not self._peft:
            return dict(convert_weight_keys(state, self._model))
        state = {merged_name(name): value for name, value in state.items()}
        # Adapters never reach the engine under these names, and PEFT's layers know them by their own
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        served = {name: value for name, value in state.items() if name not in adapters}
        return {**convert_weight_keys(served, self._model), **adapters}


class FSDP2Trainer(FSDPTrainer):
    reader = FSDP2Source


class FSDP1Trainer(FSDPTrainer):
    reader = FSDP1Source


class PEFTAdapter(ServedAdapter):
    """Args: ``source``: unmerged; ``config``: PEFT's ``LoraConfig``; ``model``: that carries it."""

    def __init__(self, source: MergingSource, config: Any, model: torch.nn.Module) -> None:
        self._source, self._model = source, model
        self.settings = config.to_dict()

    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        named, scaling = self._model.named_parameters(), self.settings["lora_alpha"] / self.settings["r"]
        refuse_unserved((n, TRAINED) for n, p in named if p.requires_grad and not is_adapter(n))
        weights = [each for each in self._source.weights.values() if each.scaling != scaling]
        refuse_unserved((w.name, f"is scaled by {w.scaling:g}, in the engine by {scaling:g}") for w in weights)
        self._source.shards()
        factors = self._source.factors
        names = tuple(name for name in factors.shards if adapter_of(name) == ADAPTER)
        found = yield from factors.gather(names, self._source.group)
        # An adapter checkpoint leaves the adapter's own name out
        return {key.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}"): factor for key, factor in found.items()}

    def release(self) -> None:
        self._source.release()
