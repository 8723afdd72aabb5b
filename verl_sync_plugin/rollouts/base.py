# SPDX-License-Identifier: Apache-2.0
"""What the plugin asks about a rollout engine in processes that hold none: the driver's, and those that register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_sync_plugin.lora.refusals import RefuseUntied
from verl_sync_plugin.lora.settings import RefuseAdapter


@dataclass(frozen=True)
class Rollout:
    """One rollout engine. The module that makes it imports neither torch, verl nor the engine at its top: every process
    that imports verl's rollouts imports it.

    Attributes:
        name: verl's ``rollout.name``.
        engine: the engine's name in messages.
        adapter: our rollout adapter for the actor workers, by its whole name.
        stock_adapter: verl's own, in whose place it is registered.
        load_replica: imports our replica class, after verl's own preparation of the engine's imports.
        stock_loader: the function in ``verl.workers.rollout.replica`` that imports verl's.
        refuse_keys: raises ValueError, naming key, value and remedy, for what the engine cannot do of verl's rollout
            config (dataclass, DictConfig or dict); its second argument says whether the plugin moves the weights, or
            verl's checkpoint engines do.
        refuse_checkpoint: likewise for the model of ``actor_rollout_ref.model.path``, where its checkpoint lies in a
            folder of this machine.
        refuse_untied: see ``RolloutEndpoint.refuse_untied``.
        refuse_adapter: see ``RolloutEndpoint.refuse_adapter``; its second argument tells under which key, with its
            value, the user gave a setting, for the message.
    """

    name: str
    engine: str
    adapter: str
    stock_adapter: str
    load_replica: Callable[[], type]
    stock_loader: str
    refuse_keys: Callable[[Any, bool], None]
    refuse_checkpoint: Callable[[str], None]
    refuse_untied: RefuseUntied
    refuse_adapter: RefuseAdapter
