# SPDX-License-Identifier: Apache-2.0
"""Which entries of verl's registries are ours, and whether they still are."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.errors import RegistryConflictError

WITHOUT = "set VERL_USE_EXTERNAL_PLUGINS=none to run verl without plugins"
ROLLOUT_KEY = ("sglang", "async")
OUR_ROLLOUT = "verl_sync_plugin.rollouts.sglang.adapter.SyncServerAdapter"
OUR_REPLICA = ("verl_sync_plugin.plugin", "load_replica")  # module and name of the replica's loader


def refuse_stranger(what: str, found: Any, known: tuple[Any, ...]) -> None:
    """Raises RegistryConflictError when what a registry holds is none of the ``known``."""
    if found not in known:
        raise RegistryConflictError(
            f"verl's {what} for sglang is already taken by {found!r}; verl-sync-plugin needs it. "
            f"Uninstall one of the two plugins, or {WITHOUT}."
        )


def verify_registered(rollout: Any) -> None:
    """Checks in a process that is about to use verl's registries that our entries are still there.

    Raises:
        RegistryConflictError: a plugin that was loaded later took one of our keys.
    """
    if rollout.get("name") != "sglang":
        return
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    refuse_stranger("rollout adapter", _ROLLOUT_REGISTRY[ROLLOUT_KEY], (OUR_ROLLOUT,))
    loader = RolloutReplicaRegistry._registry["sglang"]
    if (getattr(loader, "__module__", ""), getattr(loader, "__qualname__", "")) != OUR_REPLICA:
        refuse_stranger("rollout replica", loader, ())
