# SPDX-License-Identifier: Apache-2.0
"""The keys of a run: settled in the driver, before Ray starts (who moves the weights, and by which plain values), and
checked wherever verl builds its rollout config.

Nothing of ours may be needed to read what leaves the driver: the first thing that verl's other processes do is to
resolve the config, and not all of them have loaded plugins by then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from msgspec.structs import asdict
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from verl.utils.device import get_device_name, get_vendor
from verl.workers.config import RolloutConfig

from verl_sync_plugin import compat
from verl_sync_plugin.config import hydra_source
from verl_sync_plugin.config.refusals import (
    ACTOR,
    BACKEND_KEY,
    MODE_KEY,
    MODEL,
    OUR_BACKEND,
    SEPARATE_ASYNC,
    refuse_combinations,
    refuse_megatron_lora,
    refuse_values,
)
from verl_sync_plugin.config.settings import (
    BUCKET,
    KEY_PREFIX,
    NOT_IN_USE,
    ROLLOUT,
    SEPARATE_BACKEND,
    SHORT_BUCKET_KEY,
    TRAINERS,
    TURN_OFF,
    VENDOR,
    SyncConfig,
    bucket_megabytes,
    bucket_of,
    refuse_misplaced,
    refuse_near_misses,
    section,
    sync_config_of,
)
from verl_sync_plugin.log import say
from verl_sync_plugin.lora.settings import FLAT_LORA_TRAINERS, refuse_lora, refuse_unread_rank, unify
from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
from verl_sync_plugin.sharding_manager import known_trainers

# Mains of verl with a rollout that is never given weights
WITHOUT_SYNC = ("main_generation_server",)
OFF = "weight sync off, stock verl moves the weights"


def apply_keys(config: DictConfig, overrides: Sequence[str] = (), program: str = "", resolved: bool = False) -> str:
    """Checks our keys and writes plain values into a composed config; a second time changes nothing. Returns one line
    that says who moves the weights; empty where no engine of ours gets any. Raises ValueError, which names key, value
    and remedy. A program of your own that composes verl's config without ``hydra.main`` calls it before Ray starts.

    Args:
        config: what verl's main function gets.
        overrides: as given on the command line.
        program: the file name of the main, without ``.py``.
        resolved: the config's interpolations are gone, and with them the knowledge which of verl's keys were given.
    """
    actor_rollout_ref, rollout = (OmegaConf.select(config, key) for key in ("actor_rollout_ref", ROLLOUT))
    if not isinstance(rollout, DictConfig):
        return ""
    if rollout.get("name") not in ROLLOUTS:
        remedy = f"set {ROLLOUT}.name to one of: {', '.join(ROLLOUTS)}"
        refuse_dropped(rollout, overrides, f"{ROLLOUT}.name={rollout.get('name')}", remedy)
        leave_to_verl(rollout, resolved)
        return ""
    refuse_misplaced(config)
    on = program not in WITHOUT_SYNC and syncs(actor_rollout_ref, overrides)
    # verl's V1 trainers sync engines on the trainer's GPUs by ``naive``, whatever the backend is
    v1 = OmegaConf.select(config, "trainer.use_v1") and OmegaConf.select(config, "rollout.nnodes") is None
    ours = moves(rollout) or bool(v1 and actor_rollout_ref.get("hybrid_engine", True))
    unserved = stepping_aside(actor_rollout_ref, overrides, ours) if on else ""
    without = f", without {', '.join(rest)}" if (rest := changed(rollout)) else ""
    if unserved or not on:
        if not resolved and not sync_config_of(rollout).enabled:  # by the user, and not by the line below
            refuse_unread_rank(actor_rollout_ref.model, OmegaConf.select(actor_rollout_ref, "actor.strategy"))
        leave_to_verl(rollout, resolved)
        return unserved or f"{OFF}{without}"
    apply_rollout_keys(rollout, resolved)
    check_rollout(rollout, ours)
    refuse_values(MODEL, actor_rollout_ref.model)
    refuse_combinations(config, ours)
    settle_trainer(actor_rollout_ref, ours)
    if not ours:
        return f"{OFF}{without}"
    if not moves(rollout) and OmegaConf.select(config, MODE_KEY) == SEPARATE_ASYNC:
        return f"weight sync on; to the separate rollout {backend_of(rollout)} moves the weights{without}"
    return "weight sync on"


def is_on(rollout: Any) -> bool:
    """True if the plugin serves the engine of a rollout config (dataclass or DictConfig), and is not switched off."""
    return rollout.get("name", None) in ROLLOUTS and sync_config_of(rollout).enabled


def syncs(actor_rollout_ref: Any, overrides: Sequence[str]) -> bool:
    """True if the plugin is on for this trainer and a rollout that it serves."""
    rollout = actor_rollout_ref.rollout
    separate, enabled = backend_of(rollout) == SEPARATE_BACKEND, sync_config_of(rollout).enabled
    if separate and not enabled:
        remedy = f"Set {KEY_PREFIX}.enabled=True, or another backend, such as nccl"
        raise ValueError(f"{KEY_PREFIX}.enabled=False with {OUR_BACKEND}: that backend is the plugin's. {remedy}.")
    shares = separate or actor_rollout_ref.get("hybrid_engine", True)
    if enabled and not shares:
        refuse_dropped(rollout, overrides, "actor_rollout_ref.hybrid_engine=False", f"set {OUR_BACKEND}")
    return bool(enabled and shares)


def backend_of(rollout: Any) -> str:
    """verl's ``checkpoint_engine.backend``, by which trainer and rollout are colocated (``naive``) or separate."""
    checkpoint = section(rollout, "checkpoint_engine", f"{ROLLOUT}.checkpoint_engine")
    backend, own = str(checkpoint.get("backend", "naive")), checkpoint.get("custom_backend_module", None)
    others = own or backend.endswith(SEPARATE_BACKEND)  # ours, or another word
    if not others and get_close_matches(backend.lower(), [SEPARATE_BACKEND], cutoff=0.9):
        raise ValueError(f"{BACKEND_KEY}={backend}: no backend of verl's. Did you mean {SEPARATE_BACKEND}?")
    return backend


def moves(rollout: Any) -> bool:
    """True if the weights travel by the plugin; verl's other checkpoint engines keep their own transfer."""
    return backend_of(rollout) in ("naive", SEPARATE_BACKEND)


def stepping_aside(actor_rollout_ref: Any, overrides: Sequence[str], ours: bool) -> str:
    """The line that says why stock verl moves the weights, as it does without the plugin; empty where the plugin can.
    Raises ValueError where one of our keys was given, or stock verl would train other parameters."""
    rollout, strategy = actor_rollout_ref.rollout, OmegaConf.select(actor_rollout_ref, "actor.strategy")
    engine = rollout_of(rollout.name)
    cause = _unserved_trainer(actor_rollout_ref, strategy, engine.ENGINE) or (ours and engine.left_to_verl(rollout))
    if not cause:
        return ""
    if backend_of(rollout) == SEPARATE_BACKEND:
        raise ValueError(f"{cause}, so {OUR_BACKEND} cannot be followed. Use another, such as nccl.")
    short = rollout.get(BUCKET, None)
    if key := asked_for(rollout, overrides) or (f"{SHORT_BUCKET_KEY}={short}" if short is not None else ""):
        remedy = f"Remove that key, and stock verl moves the weights, or {TURN_OFF}"
        raise ValueError(f"{cause}, so {key} cannot be followed. {remedy}.")
    refuse_unread_rank(actor_rollout_ref.model, strategy, "stock verl's trainer")
    return f"{NOT_IN_USE}, stock verl moves the weights. {cause}."


def _unserved_trainer(actor_rollout_ref: Any, strategy: str, engine: str) -> str:
    known = known_trainers(actor_rollout_ref.rollout.name)
    if strategy not in known:
        there_are = f"there are: {', '.join(known)}; register_sharding_manager adds one"
        return f"{ACTOR}.strategy={strategy}: no sharding manager moves its weights to {engine} ({there_are})"
    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()
    if strategy in TRAINERS and (device != "cuda" or vendor != VENDOR):
        return f"{ACTOR}.strategy={strategy} on {device} of {vendor}: weight sync needs {VENDOR} (VERL_ENGINE_VENDOR)"
    megatron = (strategy == "megatron" and OmegaConf.select(actor_rollout_ref, "actor.megatron")) or {}
    if megatron.get("use_megatron_fsdp"):
        return f"{ACTOR}.megatron.use_megatron_fsdp=True: weight sync does not read its shards"
    if megatron.get("vanilla_mbridge"):
        try:
            refuse_megatron_lora(megatron, actor_rollout_ref.model)
        except ValueError:
            refuse_values(MODEL, actor_rollout_ref.model)  # a rank that is no number
            raise
        return f"{ACTOR}.megatron.vanilla_mbridge=True: weight sync serves Megatron-Bridge, verl's default"
    return ""


def asked_for(rollout: Any, overrides: Sequence[str]) -> str:
    """The first key under ``rollout.custom.sync`` that the user gave (``enabled=True`` too), one by one or by
    ``+sync=...``, with its value; empty when nobody counts on the plugin."""
    for override in overrides if sync_config_of(rollout).enabled else ():
        if override.lstrip("+~").startswith((f"{KEY_PREFIX}.", f"{KEY_PREFIX}=", "sync=colocated", "sync=separate")):
            return override.lstrip("~")
    return next(iter(changed(rollout)), "")


def changed(rollout: Any) -> list[str]:
    """Our settings that differ from their defaults, as keys with values; ``enabled=False`` is not among them."""
    sync, default = asdict(sync_config_of(rollout)), SyncConfig()
    differ = [key for key, value in sync.items() if value is not False and value != getattr(default, key)]
    return [f"{KEY_PREFIX}.{key}={sync[key]}" for key in differ]


def refuse_dropped(rollout: Any, overrides: Sequence[str], other: str, remedy: str) -> None:
    """Raises ValueError for a key of ours in a run whose weights the plugin cannot move, by the key ``other``."""
    if key := OUR_BACKEND if backend_of(rollout) == SEPARATE_BACKEND else asked_for(rollout, overrides):
        raise ValueError(f"{key} with {other}: weight sync has no part in this run. Remove the former, or {remedy}.")


def apply_rollout_keys(rollout: DictConfig, resolved: bool) -> None:
    """Writes the values of the rollout config of a run in which the plugin moves the weights."""
    key, stock = f"{ROLLOUT}.checkpoint_engine", hydra_source.stock_rollout().checkpoint_engine[BUCKET]
    if not (checkpoint := section(rollout, "checkpoint_engine", key)):
        raise ValueError(f"{key}=None: verl and weight sync need it. Leave it out to keep verl's default.")
    ours = rollout.get("_target_") == hydra_source.TARGET  # else False and 2048 are what verl's own config holds
    with read_write(rollout), open_dict(rollout):
        if BUCKET not in {*checkpoint}:  # "???" is in it
            checkpoint[BUCKET] = stock
        given = hydra_source.given(checkpoint, BUCKET, stock, resolved or not ours)
        short, long = rollout.pop(BUCKET, None), checkpoint.get(BUCKET)
        # A checkpoint engine of verl's needs room for the largest tensor: where one moves weights, its default stays
        if given or short is not None or moves(rollout):
            short = long = bucket_megabytes(short, long, given)
        checkpoint[BUCKET] = long
        rollout.update({BUCKET: short} if ours else {})
        if not (ours and hydra_source.given(rollout, "multi_stage_wake_up", True)):
            rollout.multi_stage_wake_up = True
    if backend_of(rollout) == SEPARATE_BACKEND:  # of all the rollout's keys, verl hands it only these
        name = f"checkpoint_engine.engine_kwargs.{SEPARATE_BACKEND}"
        settings = {"sync": asdict(sync_config_of(rollout)), "dtype": str(rollout.dtype), "rollout": str(rollout.name)}
        if (given := OmegaConf.select(rollout, name)) and given != settings:
            raise ValueError(f"{ROLLOUT}.{name}={given}: weight sync writes it. Use {KEY_PREFIX}.<key>=<value>.")
        OmegaConf.update(rollout, name, settings, force_add=True)


def leave_to_verl(rollout: DictConfig, resolved: bool) -> None:
    """Turns the rollout config back into verl's own, with one mark by which the plugin's classes know it."""
    stock = hydra_source.stock_rollout()
    with read_write(rollout), open_dict(rollout):
        if rollout.get("_target_") == hydra_source.TARGET:
            size = rollout.pop(BUCKET, None)
            if OmegaConf.is_dict(checkpoint := rollout.checkpoint_engine):
                size = checkpoint.get(BUCKET) if size is None else bucket_megabytes(size, None)
                checkpoint.update({} if size is None else {BUCKET: size})
            if not hydra_source.given(rollout, "multi_stage_wake_up", True, resolved):
                rollout.multi_stage_wake_up = stock.multi_stage_wake_up
            rollout._target_ = stock._target_
            if OmegaConf.is_dict(custom := rollout.get("custom")):
                custom.pop("sync", None)
            if not custom and "custom" not in stock:
                rollout.pop("custom", None)
        if rollout.get("name") in ROLLOUTS:
            OmegaConf.update(rollout, "custom.sync", {"enabled": False}, force_add=True)


def settle_trainer(actor_rollout_ref: Any, ours: bool) -> None:
    """Refuses what the sync cannot serve of the actor's model, and makes ``model.lora.*`` and the flat keys one, where
    verl itself reads only the flat ones: every process, verl's own code included, then sees the same."""
    strategy, model = OmegaConf.select(actor_rollout_ref, "actor.strategy"), actor_rollout_ref.model
    rollout, engine = actor_rollout_ref.rollout, rollout_of(actor_rollout_ref.rollout.name)
    if ours:
        engine.refuse_quantization(rollout, model)
        engine.refuse_checkpoint(str(model.get("path")), *model_overrides(actor_rollout_ref), rollout)
    stock: Any = OmegaConf.to_container(OmegaConf.load(hydra_source.verl_configs() / "model" / "hf_model.yaml"))
    refuse_near_misses(section(model, "lora", f"{MODEL}.lora"), stock["lora"], f"{MODEL}.lora")
    if strategy in FLAT_LORA_TRAINERS:
        plain: Any = OmegaConf.to_container(model, resolve=True)
        with read_write(model), open_dict(model):
            for key, value in unify(plain, stock, engine).items():
                OmegaConf.update(model, key, value, force_add=True)
        if ours:
            refuse_lora(model, strategy, engine)
    if strategy == "megatron":
        refuse_megatron_lora(OmegaConf.select(actor_rollout_ref, "actor.megatron") or {}, model)


def model_overrides(actor_rollout_ref: Any) -> tuple[str, Any]:
    """The key by which the trainer's model differs from its checkpoint's configuration, and what is there."""
    megatron = OmegaConf.select(actor_rollout_ref, "actor.strategy") == "megatron"
    path = "actor.megatron.override_transformer_config" if megatron else "model.override_config"
    return f"actor_rollout_ref.{path}", OmegaConf.select(actor_rollout_ref, path)


@dataclass
class SyncRolloutConfig(RolloutConfig):
    """verl's rollout config, checked whenever a process builds it: that is where a broken set-up is caught."""

    update_weights_bucket_megabytes: int | str | None = None  # the short key

    def __post_init__(self) -> None:
        super().__post_init__()
        # No driver has settled these where a program of the user's has composed the config, or a multirun
        short, engine, on = getattr(self, BUCKET), self.checkpoint_engine, is_on(self)
        size = bucket_of(self) if on else engine[BUCKET] if short is None else short
        if short is not None or moves(self):
            for config in (self, engine):
                object.__setattr__(config, BUCKET, size)  # they are frozen
        if on:
            check_rollout(self, moves(self))
        if self.name not in ROLLOUTS:
            return
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        ours, name = rollout_of(self.name), self.name
        compat.refuse_stranger("rollout adapter", name, _ROLLOUT_REGISTRY[name, compat.MODE], (ours.ADAPTER,))
        compat.refuse_stranger("rollout replica", name, RolloutReplicaRegistry._registry[name], (ours.load_replica,))


def check_rollout(rollout: Any, ours: bool) -> None:
    """Checks the keys of a rollout config (dataclass or settled DictConfig) but for sizes; ``ours``: the plugin moves
    the weights."""
    refuse_values(ROLLOUT, rollout)
    if ours:
        rollout_of(rollout.get("name")).refuse_keys(rollout)


class CheckKeys(Callback):
    """Settles our keys in the driver, before Ray starts. Hazard: Hydra turns an exception of a callback into a warning
    and goes on, so everything leaves as ``SystemExit``."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._settle(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks the config of a multirun's job; the task has a copy of it already, so nothing can be changed here."""
        if config.hydra.mode != RunMode.RUN:
            self._settle(deepcopy(config), config)

    def _settle(self, config: DictConfig, unsettled: DictConfig | None = None) -> None:
        try:
            overrides: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            if line := apply_keys(config, overrides, str(OmegaConf.select(config, "hydra.job.name"))):
                say(f"driver: {line}")
            if unsettled is not None:
                _refuse_unsettled(unsettled, config, line)
        except Exception as error:
            said = str(error)
            # Some of omegaconf's exceptions are ValueErrors, but have no remedy
            if not isinstance(error, ValueError) or isinstance(error, OmegaConfBaseException):
                said = " ".join(f"cannot check the keys of this run: {type(error).__name__}: {said}".split())
                said += f". Correct the value, or {compat.WITHOUT}."
            raise SystemExit(f"verl-sync-plugin: {said}") from error


def _refuse_unsettled(config: DictConfig, settled: DictConfig, line: str) -> None:
    """Refuses a multirun's config that needs settling where no V1 trainer will settle it (``hooks/trainer.py``)."""
    job, v1, own = (OmegaConf.select(config, key) for key in ("hydra.job.name", "trainer.use_v1", "rollout.nnodes"))
    if job == "main_ppo" and v1 is True and own is None:  # that of one_step_off has nodes of its own
        return
    todo = [f"{KEY_PREFIX}.enabled=False"] if line.startswith(NOT_IN_USE) else []
    wanted: Any = OmegaConf.select(settled, MODEL) or {}
    for key in wanted:
        value = OmegaConf.select(wanted, key)
        if key != "lora" and value != OmegaConf.select(config, f"{MODEL}.{key}"):
            todo.append(f"++{MODEL}.{key}={value}")
    if todo:
        add = f"add {' '.join(todo)}, which cannot be set for you here"
        raise ValueError(f"--multirun without verl's V1 trainers: {add}.")
