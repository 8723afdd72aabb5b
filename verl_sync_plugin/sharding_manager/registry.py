# SPDX-License-Identifier: Apache-2.0
"""``@register_sharding_manager``: the seam that verl lost in 0.7, registered instead of hard-coded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from verl_sync_plugin.config.settings import TRAINERS, TURN_OFF
from verl_sync_plugin.errors import RegistryConflictError

if TYPE_CHECKING:
    from verl_sync_plugin.sync.manager import ShardingManager

M = TypeVar("M", bound="type[ShardingManager]")

_managers: dict[tuple[str, str], type[ShardingManager]] = {}
# Modules that register managers on import; imported at the first look-up, so that idle processes do not pay for torch
_BUILT_IN = ("verl_sync_plugin.sharding_manager.fsdp_sglang", "verl_sync_plugin.sharding_manager.megatron_sglang")


def register_sharding_manager(*, trainer: str, rollout: str) -> Callable[[M], M]:
    """Class decorator: this ``ShardingManager`` moves weights from ``trainer`` to ``rollout``.

    Args:
        trainer: verl's actor strategy, for example ``fsdp2``.
        rollout: verl's ``rollout.name``, for example ``sglang``.

    Raises:
        RegistryConflictError: (on decoration) the pair belongs to another class already.
        TypeError: the class is not a ``ShardingManager``.
    """

    def register(cls: M) -> M:
        from verl_sync_plugin.sync.manager import ShardingManager

        if not (isinstance(cls, type) and issubclass(cls, ShardingManager)):
            raise TypeError(f"register_sharding_manager expects a ShardingManager subclass, got {cls!r}")
        taken = _managers.get((trainer, rollout))
        if taken is not None and taken is not cls:
            raise RegistryConflictError(
                f"sharding manager for trainer={trainer!r}, rollout={rollout!r} is already {taken.__qualname__}; "
                f"{cls.__qualname__} cannot take its place. Remove one of the two registrations."
            )
        _managers[(trainer, rollout)] = cls
        return cls

    return register


def known_trainers(rollout: str) -> tuple[str, ...]:
    """verl's strategies with a sharding manager to ``rollout``, without importing the built-in ones."""
    return (*TRAINERS, *sorted({t for t, r in _managers if r == rollout} - {*TRAINERS}))


def get_sharding_manager(trainer: str, rollout: str) -> type[ShardingManager]:
    """The manager registered for a pair.

    Raises:
        ValueError: there is none; the text lists what there is.
    """
    for module in _BUILT_IN:
        importlib.import_module(module)
    try:
        return _managers[(trainer, rollout)]
    except KeyError:
        known = ", ".join(f"{t}->{r}" for t, r in sorted(_managers))
        raise ValueError(
            f"actor_rollout_ref.actor.strategy={trainer!r} with actor_rollout_ref.rollout.name={rollout!r}: "
            f"no sharding manager moves these weights (there are: {known}). Use one of these, or {TURN_OFF}."
        ) from None
