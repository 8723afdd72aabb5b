# SPDX-License-Identifier: Apache-2.0
"""Refuses what a run's keys may not hold, whatever its rollout engine is, by two tables. Imports no torch.

Every refusal names key, value and remedy, in the driver, before any worker starts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from verl_sync_plugin.config.settings import (
    KEY_PREFIX,
    MODEL,
    ROLLOUT,
    SEPARATE_BACKEND,
    is_whole,
    lora_rank_of,
    section,
    sync_config_of,
)

ACTOR = "actor_rollout_ref.actor"
MODE_KEY = "trainer.v1.trainer_mode"
SEPARATE_ASYNC = "separate_async"
SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
OWN_GPUS = ("nnodes", "n_gpus_per_node")  # words from the environment, too: colocated runs do not read them
NO_QAT = "weight sync does not serve quantization-aware training"
LATE = ("override_ddp_config.overlap_param_gather=True", "verl syncs before parameters are gathered", "Set it to False")
COLOCATED_MODES = ("sync", "colocate_async")  # with these verl syncs by its backend ``naive``, whatever is set
BACKEND_KEY = f"{ROLLOUT}.checkpoint_engine.backend"
OUR_BACKEND = f"{BACKEND_KEY}={SEPARATE_BACKEND}"
_BRIDGE = f"Install Megatron-Bridge and set {ACTOR}.megatron.vanilla_mbridge=False"
NO_MEGATRON_LORA = f"{_BRIDGE}, or train all parameters with {MODEL}.lora.rank=0"


def left_to_verl(rollout: Any) -> str:
    """The key of verl's rollout config that the plugin cannot follow with any rollout engine, and stock verl can, with
    value and reason; empty where there is none."""
    on = section(rollout, "disaggregation", f"{ROLLOUT}.disaggregation").get("enabled", False)
    if on not in (None, False):
        return f"{ROLLOUT}.disaggregation.enabled={on!r}: weight sync serves one engine per rank"
    mtp = section(rollout, "mtp", f"{ROLLOUT}.mtp")
    if mtp.get("enable", False) and mtp.get("enable_rollout", False):
        return f"{ROLLOUT}.mtp.enable_rollout=True: weight sync has no draft model"
    return ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


_WHOLE = "not a whole number from 0 on"
_OWN_GPUS = [f"{pool}.{key}" for pool in (ROLLOUT, "rollout") for key in OWN_GPUS]
# Keys of verl's whose values nobody checks before they are used: the test, the problem, what to use instead.
# Hydra reads ``no`` and ``off`` as words, and a word counts as true wherever it is not asked for
VALUES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    f"{ROLLOUT}.multi_stage_wake_up": (_boolean, "not a boolean", f"{ROLLOUT}.multi_stage_wake_up=True or False"),
    **{f"{MODEL}.{key}": (is_whole, _WHOLE, "for example 32") for key in ("lora.rank", "lora_rank")},
    **{f"{ROLLOUT}.{key}": (is_whole, _WHOLE, "for example 1") for key in SIZES},
    f"{ROLLOUT}.{SIZES[2]}": (lambda value: value in (0, 1), "verl's engines have no pipeline stages", "1"),
    **dict.fromkeys(_OWN_GPUS, (lambda value: str(value).isdecimal(), _WHOLE, "for example 1")),
    **{f"{MODEL}.{key}": (_number, "not a number", "for example 32") for key in ("lora.alpha", "lora_alpha")},
    f"{MODEL}.lora.merge": (_boolean, "not a boolean", f"{MODEL}.lora.merge=True or False"),
}


def refuse_values(prefix: str, holder: Any) -> None:
    """Raises ValueError for a value of ``VALUES`` of the wrong kind, in the config ``holder`` under ``prefix``."""
    for key, (fits, problem, instead) in VALUES.items():
        if not key.startswith(f"{prefix}."):
            continue
        *path, last = key.removeprefix(f"{prefix}.").split(".")
        inner = section(holder, path[0], f"{prefix}.{path[0]}") if path else holder
        value = inner.get(last, None)
        if not fits(value) and (value is not None or (last.endswith("rank") and last in inner)):
            raise ValueError(f"{key}={value!r}: {problem}. Use {instead}.")


def refuse_combinations(config: Any, moves: bool) -> None:
    """Raises ValueError for the first combination of a run's keys that does not go together. ``moves``: the plugin
    moves the weights, and not another checkpoint engine of verl's."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    trainer, sync = config.get("trainer", None) or {}, sync_config_of(rollout)
    # verl's experimental mains do not read ``trainer.v1``, and take the rollout's GPUs from a section of their own
    v1 = OmegaConf.select(config, "rollout.nnodes") is None
    mode = str(OmegaConf.select(config, MODE_KEY) or "") if v1 else ""
    backend = OmegaConf.select(config, BACKEND_KEY)
    separate = backend == SEPARATE_BACKEND
    rank, merge = lora_rank_of(model), bool(section(model, "lora", f"{MODEL}.lora").get("merge", False))
    served, use_v1 = bool(rank) and not merge, v1 and trainer.get("use_v1", True)
    pool, where = (rollout, ROLLOUT) if v1 else (config.rollout, "rollout")
    refuse_values(where, pool)
    nodes, each = (int(pool.get(key, None) or 0) for key in OWN_GPUS)
    own = pool is not rollout and not OmegaConf.select(config, "async_training.use_dynamic_resource_scheduling")
    gpus, needed = nodes * each, math.prod(rollout.get(key, None) or 1 for key in SIZES)
    merged, adapter = f"{MODEL}.lora.merge=True", f"{MODEL}.lora.merge=False and LoRA rank {rank}"
    if sync.pause != "abort":
        abort = f"{KEY_PREFIX}.pause=abort"
        only = "has an effect only where trainer and rollout are separate and the plugin syncs them"
        # the client of fully_async, which the plugin does not replace, tells only which version a request ended with
        newer = "a response that spans a sync would be taken for one of the newer weights alone"
        kept = "the engine replaces an adapter only when no request uses it, and requests stay in the engine"
        refuse_first(
            f"{KEY_PREFIX}.pause={sync.pause!r} with ",
            (not separate, f"{BACKEND_KEY}={backend}", only, f"Set {OUR_BACKEND}, or {abort}"),
            (mode in COLOCATED_MODES, f"{MODE_KEY}={mode}", only, f"Set {MODE_KEY}={SEPARATE_ASYNC}, or {abort}"),
            ("async_training" in config, "verl's fully_async", newer, f"Set {abort}"),
            (served, adapter, kept, f"Set {abort}, or {merged}"),
        )
    if separate:
        # with too few verl would start no engine, and say nothing
        few = f"the rollout has {gpus} GPUs of its own, and one engine needs {needed} ({', '.join(SIZES)})"
        none, both = "the rollout has no GPUs of its own", f"for example {where}.nnodes=1 {where}.n_gpus_per_node=4"
        shares = "the backend needs a rollout on GPUs of its own, which this trainer does not have"
        legacy = v1 and not use_v1
        other = "trainer.use_v1=False" if legacy else f"{MODE_KEY}={mode}"
        instead = f"Set trainer.use_v1=True and {MODE_KEY}={SEPARATE_ASYNC}, or {BACKEND_KEY}=naive"
        lacks, in_mode = not gpus and (mode == SEPARATE_ASYNC or own), mode and f" with {MODE_KEY}={mode}"
        refuse_first(
            f"{where}.nnodes={nodes} and {where}.n_gpus_per_node={each}",
            (lacks, in_mode, none, f"Set both, {both}"),
            (0 < gpus < needed, "", few, "Give it more, or make the engine smaller"),
        )
        refuse_first(f"{OUR_BACKEND} with ", (legacy or mode in COLOCATED_MODES, other, shares, instead))
    if moves:
        engine = "megatron" if OmegaConf.select(config, f"{ACTOR}.strategy") == "megatron" else "fsdp_config"
        qat, late = "qat.enable=True", (OmegaConf.select(config, f"{ACTOR}.{engine}.{LATE[0].removesuffix('=True')}"))
        quantizes = OmegaConf.select(config, f"{ACTOR}.{engine}.qat.enable")
        refuse_first(f"{ACTOR}.{engine}.", (quantizes, qat, NO_QAT, "Set it to False"), (late, *LATE))
        key, base = f"{KEY_PREFIX}.verify", "where the engine serves the adapter, only the base is compared"
        row = (served and sync.verify not in ("never", "first"), adapter, base, f"Set {key}=first, or {merged}")
        refuse_first(f"{key}={sync.verify!r} with ", row)
    if sync.max_probs_diff is not None:
        key, compares = f"{KEY_PREFIX}.max_probs_diff", "verl compares no probabilities of engine and trainer"
        logs = rollout.get("calculate_log_probs", False)
        bypasses = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
        sees = "the plugin sees only their metrics"
        refuse_first(
            f"{key}={sync.max_probs_diff} with",
            (not logs, f" {ROLLOUT}.calculate_log_probs=False", compares, f"Set it to True, or remove {key}"),
            (bypasses, " algorithm.rollout_correction.bypass_mode=True", compares, f"Set it to False, or remove {key}"),
            (not use_v1, "out one of verl's V1 trainers", sees, f"Set trainer.use_v1=True, or remove {key}"),
        )


def refuse_first(subject: str, *rows: tuple[Any, str, str, str]) -> None:
    """Raises ValueError for the first row that applies: with what, why, and what to do instead."""
    for applies, other, why, remedy in rows:
        if applies:
            raise ValueError(f"{subject}{other}: {why}. {remedy}.")


def refuse_megatron_lora(megatron: Any, model: Any) -> None:
    if (rank := lora_rank_of(model)) <= 0:
        return
    left_out = "the export of Megatron-Bridge leaves DoRA's magnitudes out, and weight sync does not merge them"
    bridge = "the package megatron.bridge, which has LoRA for Megatron, is not installed where the driver runs"
    dora, vanilla = (model.get("lora", None) or {}).get("type", None) == "dora", megatron.get("vanilla_mbridge", False)
    lora, strategy, find = f"LoRA rank {rank}", f"{ACTOR}.strategy=megatron", importlib.util.find_spec
    flat, unread = not (model.get("lora", None) or {}).get("rank", None), "verl's Megatron engine reads only lora.rank"
    refuse_first(
        "",
        (flat, f"{MODEL}.lora_rank={rank} with {strategy}", unread, f"Set {MODEL}.lora.rank={rank} instead"),
        (dora, f"{MODEL}.lora.type='dora' with {strategy}", left_out, f"Set {MODEL}.lora.type=lora"),
        (vanilla, f"{ACTOR}.megatron.vanilla_mbridge=True with {lora}", "mbridge has no LoRA", NO_MEGATRON_LORA),
        (not (find("megatron") and find("megatron.bridge")), f"{lora} with {strategy}", bridge, NO_MEGATRON_LORA),
    )
