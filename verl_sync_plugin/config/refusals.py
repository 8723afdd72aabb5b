# SPDX-License-Identifier: Apache-2.0
"""What of rollout and model config this version cannot sync to any engine, refused by name before any worker starts.

Imports no torch.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from verl_sync_plugin.config.settings import (
    KEY_PREFIX,
    given_value,
    lora_rank_of,
    section,
    sync_config_of,
)

PREFIX = "actor_rollout_ref.rollout"
COLOCATE_ASYNC = "colocate_async"


def left_to_verl(rollout: Any) -> str:
    """Names what of verl's rollout keys the plugin cannot follow with any rollout engine, and stock verl can.

    Args:
        rollout: verl's rollout config (dataclass, DictConfig or dict).

    Returns:
        Key, value and reason; empty where there is nothing of the kind.

    Raises:
        ValueError: a section is no mapping; names key, value and remedy.
    """
    if (on := section(rollout, "disaggregation", f"{PREFIX}.disaggregation").get("enabled", False)) not in (
        None,
        False,
    ):
        return f"{PREFIX}.disaggregation.enabled={on!r}: weight sync serves one engine per rank"
    if (value := given_value(rollout, "quantization", f"{PREFIX}.quantization")) is not None:
        return f"{PREFIX}.quantization={value!r}: weight sync sends plain weights"
    mtp = section(rollout, "mtp", f"{PREFIX}.mtp")
    if mtp.get("enable", False) and mtp.get("enable_rollout", False):
        return f"{PREFIX}.mtp.enable_rollout=True: weight sync has no draft model"
    return ""


def refuse_wake_up(rollout: Any) -> None:
    """Raises ValueError when ``multi_stage_wake_up`` is no boolean; names key, value and remedy.

    Hydra reads ``no`` and ``off`` as words, and a word counts as true wherever it is not asked for.
    """
    value = given_value(rollout, "multi_stage_wake_up", f"{PREFIX}.multi_stage_wake_up")
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"{PREFIX}.multi_stage_wake_up={value!r}: not a boolean. Use {PREFIX}.multi_stage_wake_up=True or False."
        )


def refuse_verify(rollout: Any, model: Any) -> None:
    """Raises ValueError when ``custom.sync.verify`` asks for every sync of an adapter that the engine serves itself,
    which it takes in its own way; names key, value and remedy.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        model: ``actor_rollout_ref.model``.
    """
    verify = sync_config_of(rollout).verify
    merge = bool(section(model, "lora", "actor_rollout_ref.model.lora").get("merge", False))
    if verify not in ("never", "first") and (rank := lora_rank_of(model)) and not merge:
        raise ValueError(
            f"{KEY_PREFIX}.verify={verify!r} with actor_rollout_ref.model.lora.merge=False and LoRA rank {rank}: the "
            "engine loads an adapter that it serves in its own way, and what it makes of it is not compared; only its "
            f"base is. Set {KEY_PREFIX}.verify=first, or actor_rollout_ref.model.lora.merge=True."
        )


def refuse_probs_diff(config: Any) -> None:
    """Raises ValueError when ``custom.sync.max_probs_diff`` guards a metric that this run does not compute.

    Args:
        config: what verl's main function gets.
    """
    rollout = config.actor_rollout_ref.rollout
    if (most := sync_config_of(rollout).max_probs_diff) is None:
        return
    trainer, key = config.get("trainer", None) or {}, f"{KEY_PREFIX}.max_probs_diff={most}"
    correction = (config.get("algorithm", None) or {}).get("rollout_correction", None) or {}
    if not rollout.get("calculate_log_probs", False):
        off = f"{PREFIX}.calculate_log_probs=False: verl compares no probabilities. Set it to True"
    elif correction.get("bypass_mode", False):
        off = "algorithm.rollout_correction.bypass_mode=True: verl compares no probabilities. Set it to False"
    elif "async_training" in config or "rollout" in config or not trainer.get("use_v1", True):
        off = "a trainer that is none of verl's V1 trainers, whose metrics are not seen. Set trainer.use_v1=True"
    else:
        return
    raise ValueError(f"{key} with {off}, or remove {KEY_PREFIX}.max_probs_diff.")


def refuse_lora_values(model: Any) -> None:
    """Raises ValueError when a LoRA key holds a value of the wrong kind; names key, value and remedy.

    Args:
        model: ``actor_rollout_ref.model``; its ``lora`` block and flat keys are looked at.
    """
    prefix = "actor_rollout_ref.model"
    block = section(model, "lora", f"{prefix}.lora")
    for holder, key, name in ((block, "rank", "lora.rank"), (model, "lora_rank", "lora_rank")):
        rank = given_value(holder, key, f"{prefix}.{name}")
        if key in holder and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
            raise ValueError(f"{prefix}.{name}={rank!r}: not a whole number from 0 on. Use for example 32.")
    for holder, key, name in ((block, "alpha", "lora.alpha"), (model, "lora_alpha", "lora_alpha")):
        alpha = given_value(holder, key, f"{prefix}.{name}")
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha)
        if alpha is not None and not number:
            raise ValueError(f"{prefix}.{name}={alpha!r}: not a number. Use for example 32.")
    merge = given_value(block, "merge", f"{prefix}.lora.merge")
    if merge is not None and not isinstance(merge, bool):
        raise ValueError(f"{prefix}.lora.merge={merge!r}: not a boolean. Use {prefix}.lora.merge=True or False.")
    section(block, "peft", f"{prefix}.lora.peft")


def refuse_megatron_lora(megatron: Any, model: Any) -> None:
    """Raises ValueError when a Megatron trainer's LoRA cannot be synced; names key, value and remedy.

    Args:
        megatron: ``actor_rollout_ref.actor.megatron``.
        model: ``actor_rollout_ref.model``.
    """
    rank = lora_rank_of(model)
    if rank <= 0:
        return
    kind = (model.get("lora", None) or {}).get("type", None)
    if kind == "dora":
        raise ValueError(
            "actor_rollout_ref.model.lora.type='dora' with actor_rollout_ref.actor.strategy=megatron: the export of "
            "Megatron-Bridge leaves DoRA's magnitudes out, and weight sync does not merge them. Set "
            "actor_rollout_ref.model.lora.type=lora."
        )
    remedy = "Install Megatron-Bridge and set actor_rollout_ref.actor.megatron.vanilla_mbridge=False, or train all "
    remedy += "parameters with actor_rollout_ref.model.lora.rank=0."
    if megatron.get("vanilla_mbridge", False):
        raise ValueError(
            f"actor_rollout_ref.actor.megatron.vanilla_mbridge=True with LoRA rank {rank}: mbridge has no LoRA. "
            f"{remedy}"
        )
    if not _has_megatron_bridge():
        raise ValueError(
            f"LoRA rank {rank} with actor_rollout_ref.actor.strategy=megatron: the package megatron.bridge, which has "
            f"LoRA for Megatron, is not installed. {remedy}"
        )


def _has_megatron_bridge() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:  # no package "megatron" at all
        return False
