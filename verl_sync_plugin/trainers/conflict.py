# SPDX-License-Identifier: Apache-2.0
"""Why a worker's training engine is none of ours, although the plugin is on."""

from __future__ import annotations

from collections import defaultdict

from verl.workers.engine.base import EngineRegistry

from verl_sync_plugin.config.settings import TRAINERS, TURN_OFF
from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.trainers.shard_stream import VENDORS


def refuse_plain_stream() -> None:
    """Raises the error that explains why this process's weight stream is not ours.

    Raises:
        RegistryConflictError: verl's registry holds somebody else's engine for one of our strategies.
        ValueError: all of these are ours, so the trainer's strategy is another.
    """
    engines = defaultdict(list)
    for strategy in TRAINERS:
        if (engine := _chosen(strategy)) is not None:
            engines[engine].append(strategy)
    for engine, strategies in engines.items():
        what = f"verl's training engine for {', '.join(strategies)} is {engine.__module__}.{engine.__qualname__} here"
        if engine.__module__.startswith("verl."):
            raise RegistryConflictError(
                f"{what}, verl's own: verl-sync-plugin registers its engines for the vendors {' and '.join(VENDORS)}. "
                f"Set VERL_ENGINE_VENDOR={VENDORS[0]} in the environment of every node, or {TURN_OFF}."
            )
        raise RegistryConflictError(
            f"{what}, where verl-sync-plugin needs its own: another plugin has taken the key. Uninstall one of the two "
            f"plugins, or {TURN_OFF}."
        )
    raise ValueError(
        "the training engine exports a plain weight stream: no sharding manager knows it "
        f"(actor_rollout_ref.actor.strategy other than {', '.join(TRAINERS)}). Use one of these, or {TURN_OFF}."
    )


def _chosen(strategy: str) -> type | None:
    """The engine that verl chooses in this process; ``None`` when it is ours or a subclass, or there is none."""
    try:
        engine: type = EngineRegistry.get_engine_cls("language_model", strategy)
    except (AssertionError, ValueError):  # not installed, or not for this device
        return None
    ours = any(base.__module__.startswith("verl_sync_plugin.") for base in engine.__mro__)
    return None if ours else engine
