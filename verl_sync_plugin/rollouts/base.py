# SPDX-License-Identifier: Apache-2.0
"""What the plugin asks about a rollout engine in processes that hold none: the driver's, and those that register."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any


class Rollout(ABC):
    """One rollout engine. The module of an implementation imports neither torch, verl nor the engine at its top: every
    process that imports verl's rollouts imports it.

    Attributes:
        name: verl's ``rollout.name``.
        engine: the engine's name in messages.
        adapter: our rollout adapter for the actor workers, by its whole name.
        stock_adapter: verl's own, in whose place it is registered.
        stock_loader: the function in ``verl.workers.rollout.replica`` that imports verl's own replica class.
    """

    name: str
    engine: str
    adapter: str
    stock_adapter: str
    stock_loader: str

    @staticmethod
    @abstractmethod
    def load_replica() -> type:
        """Imports our replica class, after verl's own preparation of the engine's imports."""

    @abstractmethod
    def refuse_keys(self, rollout: Any, moves: bool) -> None:
        """Refuses what the engine cannot do of a rollout config (dataclass, DictConfig or dict).

        Args:
            rollout: verl's rollout config.
            moves: the plugin moves the weights; otherwise verl's checkpoint engines do.

        Raises:
            ValueError: names key, value and remedy.
        """

    @abstractmethod
    def refuse_checkpoint(self, path: str) -> None:
        """Refuses a model that the engine cannot be given, where its checkpoint lies in a folder of this machine.

        Args:
            path: ``actor_rollout_ref.model.path``.

        Raises:
            ValueError: names key, value and remedy.
        """

    @abstractmethod
    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        """See ``RolloutEndpoint.refuse_untied``."""

    @abstractmethod
    def refuse_adapter(self, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """See ``RolloutEndpoint.refuse_adapter``; ``keys`` are those under which the user gave ``settings``, and a
        field goes by its own name where there is none."""
