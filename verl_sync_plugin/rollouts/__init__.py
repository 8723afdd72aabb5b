# SPDX-License-Identifier: Apache-2.0
"""Rollout engines, one folder each: how an engine is asked, how it loads, what it needs.

An engine is added by a folder here, its line in ``ROLLOUTS``, and a pair with every trainer in ``sharding_manager/``.
No room below this one imports an engine or knows its ways. The folder provides:

    Rollout           (``base``)                   what is registered with verl, and which keys, checkpoints and
                                                   adapters the engine cannot serve, known before anything runs
    an adapter        (verl's ``BaseRollout``)     in every actor worker: makes the sharding manager at the first
                                                   sync and calls it from ``resume``, ``update_weights``, ``release``
    a replica         (verl's ``RolloutReplica``)  launches the engine with what follows in it
    RolloutEndpoint   (``sync/endpoint``)          one trainer rank's view of its engine: has it wake, load, flush,
                                                   answer, and refuse
    EngineModel       (``receiver/engine_model``)  the model of one engine rank: its load, and what a plan hangs on
    a loader          (``ReceiverSession.run``)    what the engine calls on all its ranks for one load: it connects
                                                   to the trainer rank beside, says ``Join`` and runs the session
"""

from __future__ import annotations

import importlib

from verl_sync_plugin.rollouts.base import Rollout

# What a script's rollout runs, see ``spmd/``
LOCAL = "sglang"
# By verl's ``rollout.name``: the module whose ``ROLLOUT`` it is
ROLLOUTS = {"sglang": "verl_sync_plugin.rollouts.sglang.rollout"}


def serves(name: object) -> bool:
    """Whether the plugin has a rollout for verl's ``rollout.name``."""
    return name in ROLLOUTS


def rollout_of(name: str) -> Rollout:
    """The rollout of that name, for which ``serves`` holds."""
    found: Rollout = importlib.import_module(ROLLOUTS[name]).ROLLOUT
    return found
