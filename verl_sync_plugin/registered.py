# SPDX-License-Identifier: Apache-2.0
"""Whether what verl's registries hold for a rollout is ours."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.errors import RegistryConflictError
from verl_sync_plugin.rollouts import rollout_of, serves

WITHOUT = "set VERL_USE_EXTERNAL_PLUGINS=none to run verl without plugins"
MODE = "async"  # the other half of verl's key for rollout adapters, beside the rollout's name


def refuse_stranger(what: str, rollout: str, found: Any, known: tuple[Any, ...]) -> None:
    """Raises RegistryConflictError when what a registry holds for a rollout is none of the ``known``."""
    if found not in known:
        raise RegistryConflictError(
            f"verl's {what} for {rollout} is already taken by {found!r}; verl-sync-plugin needs it. "
            f"Uninstall one of the two plugins, or {WITHOUT}."
        )


def verify_registered(rollout: Any) -> None:
    """Checks in a process that is about to use verl's registries that our entries are still there.

    Args:
        rollout: verl's rollout config.

    Raises:
        RegistryConflictError: a plugin that was loaded later took one of our keys.
    """
    name = rollout.get("name")
    if not serves(name):
        return
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    ours = rollout_of(name)
    refuse_stranger("rollout adapter", name, _ROLLOUT_REGISTRY[name, MODE], (ours.adapter,))
    refuse_stranger("rollout replica", name, RolloutReplicaRegistry._registry[name], (ours.load_replica,))
