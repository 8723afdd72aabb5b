# SPDX-License-Identifier: Apache-2.0
"""From verl's model config to PEFT: the adapter's settings and the model that carries it."""

from __future__ import annotations

from typing import Any

import torch

from verl_sync_plugin.config.settings import lora_rank_of
from verl_sync_plugin.lora.settings import PEFT_KEY

# Input and output embeddings of the model families that tie them
_TIED_NAMES = ("model.embed_tokens", "lm_head")


def lora_config(model: Any) -> Any:
    """PEFT's ``LoraConfig`` for verl's ``HFModelConfig``: the flat keys, ``lora.peft``, or the adapter that is loaded.

    Raises:
        ValueError: PEFT refuses the settings.
    """
    from peft import LoraConfig, PeftConfig, TaskType
    from verl.utils.fs import copy_to_local
    from verl.utils.py_functional import convert_to_regular_types

    path = getattr(model, "lora_adapter_path", None)
    if path is not None:
        return PeftConfig.from_pretrained(copy_to_local(path, use_shm=model.use_shm))
    more = convert_to_regular_types(model.lora.get("peft", None) or {})
    try:
        return LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=convert_to_regular_types(model.target_modules),
            target_parameters=convert_to_regular_types(model.target_parameters),
            exclude_modules=convert_to_regular_types(model.exclude_modules),
            **{"bias": "none", **more},
        )
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{PEFT_KEY}={more}: PEFT refuses it: {error}. Correct the setting.") from error


def build_peft_model(module: torch.nn.Module, model: Any) -> torch.nn.Module:
    """Adds the adapter to a model as verl's FSDP engine does, with all of ``lora.peft``.

    Returns:
        A ``PeftModel`` whose adapter has the dtype of the base: FSDP1 flattens parameters of one dtype only.
    """
    from peft import get_peft_model

    module.enable_input_require_grads()  # type: ignore[operator]
    dtype = next(parameter.dtype for parameter in module.parameters())
    adapted: torch.nn.Module = get_peft_model(module, lora_config(model))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def unties_embeddings(model: Any) -> bool:
    """Whether the merged model has two different weights where its checkpoint ties embedding and head.

    The adapter changes one of them, or each in its own way. An engine that ties them cannot serve that.

    Args:
        model: verl's ``HFModelConfig``.
    """
    if lora_rank_of(model) == 0 or not getattr(model.hf_config, "tie_word_embeddings", False):
        return False
    config = lora_config(model)
    targeted, saved = adapted_ends(config)
    if saved:  # PEFT can save one module for both; the factors that it ties become parameters of their own in FSDP
        return not getattr(config, "ensure_weight_tying", False)
    return bool(targeted)


def adapted_ends(config: Any) -> tuple[list[str], list[str]]:
    """Which of embedding and head have factors in an adapter, and which it trains whole; by name.

    Args:
        config: PEFT's ``LoraConfig``.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    saved = [name for name in _TIED_NAMES for save in config.modules_to_save or () if f".{name}".endswith(f".{save}")]
    if config.target_modules in (None, "all-linear"):  # PEFT leaves the head out of all-linear
        return [], saved
    return [name for name in _TIED_NAMES if check_target_module_exists(config, name)], saved
