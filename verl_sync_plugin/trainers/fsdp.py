# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP and FSDP2 training engines, with or without a PEFT adapter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import torch
from verl.utils.model import convert_weight_keys

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.lora.peft import ADAPTER, Adapters, adapter_of, carries_adapter, is_adapter, merged_name
from verl_sync_plugin.lora.settings import unties_embeddings
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend
from verl_sync_plugin.trainers.fsdp1 import FSDP1Source
from verl_sync_plugin.trainers.fsdp2 import FSDP2Source
from verl_sync_plugin.trainers.lora import MergingSource
from verl_sync_plugin.trainers.naming import Naming, checkpoint_rewrite, unsaved_of


class FSDPTrainer(TrainerBackend):
    """Both FSDP generations; ``reader`` yields all bases, adapters included."""

    reader: ClassVar[type[FSDP1Source] | type[FSDP2Source]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peft = carries_adapter(self._model)
        self._copies: dict[str, str | None] = {}
        self.serves_adapter = self._peft and not self.engine.model_config.lora.get("merge", False)

    @property
    def _model(self) -> Any:
        """The HF model inside an FSDP1 wrapper; an FSDP2 module is its own."""
        return getattr(self.engine.module, "_fsdp_wrapped_module", self.engine.module)

    @property
    def adapter_config(self) -> Any:
        """PEFT's config of verl's adapter; ``None`` where it has another name."""
        return (getattr(self._model, "peft_config", None) or {}).get(ADAPTER)

    def open_source(self) -> ParameterSource:
        if getattr(self.engine, "_qat_enabled", False):
            raise ValueError(f"actor.fsdp_config.qat.enable=True: weight sync does not quantize; {TURN_OFF}.")
        if not self._peft:
            return self._plain_source()
        found = Adapters(self._model)
        self._copies = found.copies
        if not self.serves_adapter:
            self._refuse_tied()
        elif (adapters := {weight.adapter for weight in found.weights}) != {ADAPTER} or self.adapter_config is None:
            raise ValueError(
                f"actor_rollout_ref.model.lora.merge=False: the engine serves the adapter {ADAPTER!r}, and in use are "
                f"{sorted(adapters)}. Set actor_rollout_ref.model.lora.merge=True, which serves them merged."
            )
        found.rename(self._rename)
        bound, merges = self.config.timeout_seconds, not self.serves_adapter
        return MergingSource(self._plain_source(), found, self.device, bound, merges)

    def open_adapter(self, source: ParameterSource) -> ServedAdapter:
        assert isinstance(source, MergingSource), "an adapter is served"
        return PEFTAdapter(source, self.adapter_config)

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.engine.model_config.hf_config, "tie_word_embeddings", False))

    def untied_ends(self) -> list[str]:
        """Those that are adapted; none where PEFT trains one module for both."""
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        together = getattr(self.adapter_config, "ensure_weight_tying", False)
        if self._tied and together and all(hasattr(end, "modules_to_save") for end in ends):
            return []
        return [type(end).__name__ for end in ends if hasattr(end, "base_layer") or hasattr(end, "modules_to_save")]

    def _refuse_tied(self) -> None:
        """Raises ValueError unless the engine was launched untied where the adapter changes one side only."""
        adapted = self.untied_ends()
        if adapted and self._tied and not unties_embeddings(self.engine.model_config):
            raise ValueError(
                f"the adapter changes the embedding or the head ({', '.join(adapted)}), which this model ties, and the "
                "engine ties them too. Set actor_rollout_ref.model.exclude_modules so that neither is adapted, or with "
                "actor_rollout_ref.actor.strategy=fsdp2, train the embedding whole for both: name it in "
                "+actor_rollout_ref.model.lora.peft.modules_to_save and set "
                "+actor_rollout_ref.model.lora.peft.ensure_weight_tying=True."
            )

    def _plain_source(self) -> ParameterSource:
        model = self._model.get_base_model() if self._peft else self._model
        # Where the engine unties them, too, what was tied travels twice
        unsaved = frozenset[str]() if unties_embeddings(self.engine.model_config) else unsaved_of(model)
        return self.reader(self.engine.module, Naming(self.policy, checkpoint_rewrite(model), self._rename, unsaved))

    def _rename(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self._peft:
            return dict(convert_weight_keys(state, self._model))
        state = {hf: value for name, value in state.items() if (hf := merged_name(name, self._copies)) is not None}
        # Adapters never reach the engine under these names, and PEFT's layers know them by their own
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        served = {name: value for name, value in state.items() if name not in adapters}
        return {**convert_weight_keys(served, self._model), **adapters}


class FSDP2Trainer(FSDPTrainer):
    reader = FSDP2Source


class FSDP1Trainer(FSDPTrainer):
    reader = FSDP1Source


class PEFTAdapter(ServedAdapter):
    """Args: ``source``: unmerged; ``config``: PEFT's ``LoraConfig``."""

    def __init__(self, source: MergingSource, config: Any) -> None:
        self._source = source
        self.settings = config.to_dict()

    def look(self) -> None:
        self._source.shards()

    def gather(self, run: str) -> Generator[None, None, dict[str, torch.Tensor]]:
        factors = self._source.factors
        names = tuple(name for name in factors.shards if adapter_of(name) == ADAPTER)
        found = yield from factors.gather(names, self._source.group)
        # An adapter checkpoint leaves the adapter's own name out
        return {key.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}"): factor for key, factor in found.items()}

    def release(self) -> None:
        self._source.release()
