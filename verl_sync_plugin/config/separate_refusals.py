# SPDX-License-Identifier: Apache-2.0
"""What a rollout on GPUs of its own cannot be given, and what no other rollout has; refused by name before any worker
starts.

Imports no torch.
"""

from __future__ import annotations

import math
from typing import Any

from verl_sync_plugin.config.bucket_size import SHORT_BUCKET_KEY
from verl_sync_plugin.config.refusals import COLOCATE_ASYNC, PREFIX
from verl_sync_plugin.config.settings import (
    KEY_PREFIX,
    SEPARATE_BACKEND,
    SyncConfig,
    given_value,
    lora_rank_of,
    section,
    sync_config_of,
)

MODE_KEY = "trainer.v1.trainer_mode"
SEPARATE_ASYNC = "separate_async"
COLOCATED_MODES = ("sync", COLOCATE_ASYNC)  # with these verl syncs by its backend ``naive``, whatever is set


def mode_of(config: Any) -> str:
    """verl's ``trainer.v1.trainer_mode``; empty in the configs of its experimental mains, which do not read it.

    Args:
        config: a whole config of one of verl's mains.
    """
    experimental = "async_training" in config or "rollout" in config
    v1 = (config.get("trainer", None) or {}).get("v1", None) or {}
    return "" if experimental else str(v1.get("trainer_mode", None) or "")


def refuse_pause(rollout: Any, mode: str = "") -> None:
    """Raises ValueError when ``custom.sync.pause`` asks for what only a separate rollout has: requests in flight while
    its weights are synced; names key, value and remedy.

    Args:
        rollout: verl's rollout config (dataclass, DictConfig or dict).
        mode: verl's ``trainer.v1.trainer_mode``; empty where another of verl's mains runs.
    """
    pause = sync_config_of(rollout).pause
    engine = section(rollout, "checkpoint_engine", f"{PREFIX}.checkpoint_engine")
    backend = engine.get("backend", "naive")
    if pause == "abort":
        return
    only = "has an effect only where trainer and rollout are separate and the plugin syncs them."
    if backend != SEPARATE_BACKEND:
        key = f"{PREFIX}.checkpoint_engine.backend"
        raise ValueError(
            f"{KEY_PREFIX}.pause={pause!r} with {key}={backend}: {only} Set {key}={SEPARATE_BACKEND}, or "
            f"{KEY_PREFIX}.pause=abort."
        )
    if mode in COLOCATED_MODES:
        raise ValueError(
            f"{KEY_PREFIX}.pause={pause!r} with {MODE_KEY}={mode}: {only} Set {MODE_KEY}={SEPARATE_ASYNC}, or "
            f"{KEY_PREFIX}.pause=abort."
        )


def refuse_delivery(sync: SyncConfig, separate: bool) -> None:
    """Raises ValueError when a delivery is asked for that there is not; names key, value and remedy.

    Args:
        sync: the settings.
        separate: trainer and rollout share no GPU.
    """
    there = "separate" if separate else "colocated"
    other = "gathered" if separate else "broadcast"
    if sync.delivery == other:
        remedy = "broadcast" if separate else "gathered"
        raise ValueError(
            f"{KEY_PREFIX}.delivery={other!r}: not for a {there} rollout. Use {remedy}, or auto for the fastest."
        )


def refuse_separate(rollout: Any, model: Any, mode: str = "") -> None:
    """Raises ValueError for what a rollout on GPUs of its own cannot be given; names key, value and remedy.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        model: ``actor_rollout_ref.model``.
        mode: verl's ``trainer.v1.trainer_mode``; empty where another of verl's mains runs.
    """
    backend = f"{PREFIX}.checkpoint_engine.backend={SEPARATE_BACKEND}"
    if given_value(rollout, "update_weights_bucket_megabytes", SHORT_BUCKET_KEY) == "auto":
        raise ValueError(f"{SHORT_BUCKET_KEY}='auto' with {backend}: there is no engine beside. Use for example 512.")
    _refuse_too_few_gpus(rollout, mode)
    merge = bool(section(model, "lora", "actor_rollout_ref.model.lora").get("merge", False))
    pause = sync_config_of(rollout).pause
    if pause != "abort" and (rank := lora_rank_of(model)) and not merge:
        raise ValueError(
            f"{KEY_PREFIX}.pause={pause!r} with actor_rollout_ref.model.lora.merge=False and LoRA rank {rank}: the "
            "engine replaces an adapter only when no request uses it, and with this pause requests stay in the engine. "
            f"Set {KEY_PREFIX}.pause=abort, or actor_rollout_ref.model.lora.merge=True."
        )


def _refuse_too_few_gpus(rollout: Any, mode: str) -> None:
    nodes, each = (int(rollout.get(key, 0) or 0) for key in ("nnodes", "n_gpus_per_node"))
    if mode == SEPARATE_ASYNC and nodes * each == 0:
        raise ValueError(
            f"{PREFIX}.nnodes={nodes} and {PREFIX}.n_gpus_per_node={each} with {MODE_KEY}={mode}: the rollout has no "
            f"GPUs of its own. Set both, for example {PREFIX}.nnodes=1 {PREFIX}.n_gpus_per_node=4."
        )
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    needed = math.prod(int(rollout.get(key, 1) or 1) for key in sizes)
    if 0 < nodes * each < needed:  # verl would start no engine, and say nothing
        raise ValueError(
            f"{PREFIX}.nnodes={nodes} and {PREFIX}.n_gpus_per_node={each}: the rollout has {nodes * each} GPUs of its "
            f"own, and one engine needs {needed} ({', '.join(sizes)}). Give it more, or make the engine smaller."
        )


def refuse_fully_async(rollout: Any) -> None:
    """Raises ValueError where verl's ``fully_async`` would give a response the wrong age; names key, value and remedy.

    Its own client, which the plugin does not replace, tells only which version a request ended with. With ``abort`` no
    request outlives a sync, so that is right.

    Args:
        rollout: ``actor_rollout_ref.rollout`` of a config of ``fully_async``.
    """
    pause = sync_config_of(rollout).pause
    if pause != "abort":
        raise ValueError(
            f"{KEY_PREFIX}.pause={pause!r} with verl's fully_async: a response that spans a sync would be taken for "
            f"one of the newer weights alone. Set {KEY_PREFIX}.pause=abort."
        )
