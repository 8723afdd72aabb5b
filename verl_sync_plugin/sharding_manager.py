# SPDX-License-Identifier: Apache-2.0
"""Registers who moves the weights, by trainer and rollout: ``@register_sharding_manager``, which verl lost in 0.7."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.errors import RegistryConflictError

if TYPE_CHECKING:
    from verl_sync_plugin.sync.manager import ShardingManager

M = TypeVar("M", bound="type[ShardingManager]")

# By verl's actor strategy and ``rollout.name``: the manager's name in logs, and the backend that it has, by its module
# in ``trainers``, which is imported when it is asked for: other processes do not pay for torch
_BUILT_IN = {
    ("fsdp", "sglang"): ("FSDPSGLangShardingManager", "fsdp", "FSDP1Trainer"),
    ("fsdp2", "sglang"): ("FSDP2SGLangShardingManager", "fsdp", "FSDP2Trainer"),
    ("megatron", "sglang"): ("MegatronSGLangShardingManager", "megatron.trainer", "MegatronTrainer"),
}
_managers: dict[tuple[str, str], type[ShardingManager]] = {}


def register_sharding_manager(*, trainer: str, rollout: str) -> Callable[[M], M]:
    """Class decorator: this ``ShardingManager`` moves weights from ``trainer`` (verl's actor strategy, for example
    ``fsdp2``) to ``rollout`` (verl's ``rollout.name``). Raises RegistryConflictError for a pair that is taken."""

    def register(cls: M) -> M:
        from verl_sync_plugin.sync.manager import ShardingManager

        if not (isinstance(cls, type) and issubclass(cls, ShardingManager)):
            raise TypeError(f"register_sharding_manager expects a ShardingManager subclass, got {cls!r}")
        pair = trainer, rollout
        taken = _managers[pair].__qualname__ if pair in _managers else _BUILT_IN.get(pair, ("",))[0]
        if taken and _managers.get(pair) is not cls:
            raise RegistryConflictError(
                f"sharding manager for trainer={trainer!r}, rollout={rollout!r} is already {taken}; "
                f"{cls.__qualname__} cannot take its place. Remove one of the two registrations."
            )
        _managers[pair] = cls
        return cls

    return register


def known_trainers(rollout: str) -> tuple[str, ...]:
    """verl's strategies with a sharding manager to ``rollout``."""
    return tuple(sorted({t for t, r in (*_BUILT_IN, *_managers) if r == rollout}))


def get_sharding_manager(trainer: str, rollout: str) -> type[ShardingManager]:
    """The manager registered for a pair. Raises ValueError, which lists what there is."""
    pair = trainer, rollout
    if pair not in _managers and pair in _BUILT_IN:
        from verl_sync_plugin.sync.manager import ShardingManager

        name, file, backend = _BUILT_IN[pair]
        module = importlib.import_module(f"verl_sync_plugin.trainers.{file}")
        _managers[pair] = type(name, (ShardingManager,), {"backend": getattr(module, backend)})
    if pair not in _managers:
        known = ", ".join(f"{t}->{r}" for t, r in sorted({*_managers, *_BUILT_IN}))
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={trainer!r} with actor_rollout_ref.rollout.name={rollout!r}: "
            f"no sharding manager moves these weights (there are: {known}). Use one of these, or {TURN_OFF}."
        )
    return _managers[pair]
