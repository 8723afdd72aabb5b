# SPDX-License-Identifier: Apache-2.0
"""Registers everything with verl. Every process that imports verl loads this, so it imports nothing heavy: heavy
modules are named, or imported with verl's (``hooks/``).

Hazard: verl swallows an exception of a plugin at DEBUG level and goes on with its own code. A run that asked for this
plugin must not end up there, so a failure ends the process instead.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

# Also in compat.py, whose import may be what fails
WITHOUT = "set VERL_USE_EXTERNAL_PLUGINS=none to run verl without plugins"


def _stop(error: Exception) -> NoReturn:
    """Ends the process with one message; verl would swallow the exception itself."""
    text = f"verl-sync-plugin cannot be loaded: {type(error).__name__}: {error}"
    print(text if "VERL_USE_EXTERNAL_" in text else f"{text} ({WITHOUT})", file=sys.stderr, flush=True)
    raise SystemExit(1) from error


try:
    import wrapt

    from verl_sync_plugin import compat
    from verl_sync_plugin.config import settings  # noqa: F401  (a broken one is to be noticed here)
    from verl_sync_plugin.errors import IncompatibleHostError, RegistryConflictError
    from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
except Exception as import_error:
    _stop(import_error)


def register() -> None:
    """Arranges for each registry of verl's to be written to when verl imports its module: importing these here would
    cost seconds in every process. One that verl has imported already is served at once."""
    host = getattr(sys.modules.get("verl"), "__version__", None) or compat.version_of("verl")
    if re.match(r"0\.[0-8]\b", host):  # it knows no entry points, so a variable has named this module
        remedy = "Install verl==0.9.1, or take verl_sync_plugin out of VERL_USE_EXTERNAL_MODULES"
        raise IncompatibleHostError(f"verl 0.9 or newer is needed, and verl {host} is installed. {remedy}.")
    hooks: dict[str, Callable[[Any], Any]] = {
        "hydra": _register_hydra,
        "verl.workers.rollout.base": _register_rollout,
        "verl.workers.rollout.replica": _register_replica,
        "verl.checkpoint_engine.base": _register_checkpoint_engine,
        "verl.workers.engine": partial(_register_engines, "engines", "fsdp, fsdp2"),
        # only where megatron-core is installed
        "verl.workers.engine.megatron": partial(_register_engines, "megatron_engine", "megatron"),
        "verl.trainer.ppo.v1": _register_trainers,
    }
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, module)


def _register_hydra(_: Any) -> None:
    from hydra.core.plugins import Plugins

    from verl_sync_plugin.config.hydra_source import SyncConfigSource, SyncSearchPath

    Plugins.instance().register(SyncConfigSource)
    Plugins.instance().register(SyncSearchPath)


def _register_rollout(base: Any) -> None:
    registry = compat.offered(base, "_ROLLOUT_REGISTRY")
    for name in ROLLOUTS:
        ours, found = rollout_of(name), registry.get((name, compat.MODE))
        compat.refuse_stranger("rollout adapter", name, found, (ours.STOCK_ADAPTER, ours.ADAPTER))
        registry[name, compat.MODE] = ours.ADAPTER


def _register_replica(replica: Any) -> None:
    registry = compat.offered(replica, "RolloutReplicaRegistry")
    for name in ROLLOUTS:
        ours = rollout_of(name)
        stock = compat.offered(replica, ours.STOCK_LOADER)
        compat.refuse_stranger("rollout replica", name, registry._registry.get(name), (stock, ours.load_replica))
        registry.register(name, ours.load_replica)


def _register_checkpoint_engine(base: Any) -> None:
    compat.offered(base, "CheckpointEngineRegistry")
    importlib.import_module("verl_sync_plugin.hooks.separate")  # registers on import


def _register_engines(module: str, strategies: str, _: Any) -> None:
    try:
        importlib.import_module(f"verl_sync_plugin.hooks.{module}")  # registers on import
    except AssertionError as error:  # verl's way to refuse a taken key
        raise RegistryConflictError(
            f"verl's training engine for {strategies} on (cuda, nvidia) is already taken: {error} "
            f"Uninstall one of the two plugins, or {WITHOUT}."
        ) from error


def _register_trainers(_: Any) -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

    from verl_sync_plugin.hooks.trainer import SyncTrainerMixin, reporting

    for name, trainer in list(TRAINER_REGISTRY.items()):  # another plugin's too; what comes later: say_without_metrics
        if isinstance(trainer, type) and issubclass(trainer, PPOTrainer) and not issubclass(trainer, SyncTrainerMixin):
            TRAINER_REGISTRY[name] = reporting(trainer)


try:
    register()
except Exception as registration_error:
    _stop(registration_error)
