# SPDX-License-Identifier: Apache-2.0
"""What a sharding manager needs from the rollout side: one class per rollout engine, in ``rollouts/``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import LoadRequest


@dataclass(frozen=True)
class LoadOutcome:
    """What the engine said at the end of a load.

    Attributes:
        sleep_seconds: how long the engine took to fall asleep before this sync; 0.0 when unknown.
        nbytes: what the engine was handed of an adapter, as it travelled; 0 for a load that a trainer feeds.
    """

    sleep_seconds: float = 0.0
    nbytes: int = 0


class PendingLoad(ABC):
    """A load that runs in the engine while the trainer feeds it."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether the engine has answered; before the commit that means it failed."""

    async def complaints(self, timeout: float) -> list[str]:
        """Why engine ranks cannot come to their trainer ranks, as far as they have said so; by default they cannot say.

        Raises:
            RuntimeError: the engine is gone.
            TimeoutError: no answer within ``timeout`` seconds.
        """
        return []

    @abstractmethod
    async def outcome(self, timeout: float) -> LoadOutcome:
        """The engine's answer.

        Raises:
            RuntimeError: the engine refused or failed the update.
            TimeoutError: no answer within ``timeout`` seconds.
        """


class RolloutEndpoint(ABC):
    """One trainer rank's view of its rollout engine. Only the leader of an engine's ranks talks to the engine.

    Attributes:
        name: of the engine, for messages.
    """

    name: str = "the engine"

    @property
    @abstractmethod
    def leader(self) -> bool:
        """Whether this rank speaks for its engine."""

    @property
    @abstractmethod
    def restores_uncovered(self) -> bool:
        """Whether what no sync writes comes back from a host copy of real (not dummy) weights."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Global trainer ranks beside the engine's ranks, in tensor-parallel order."""

    @abstractmethod
    async def resume(self, tags: list[str]) -> None:
        """Leader only: resumes what is released of ``tags``; harmless when nothing is."""

    @abstractmethod
    async def finish(self, tags: list[str]) -> None:
        """Leader only: resumes what is released of ``tags``, then flushes the prefix cache once."""

    @abstractmethod
    async def abandon(self, why: str) -> None:
        """Leader only: the sync failed; the engine must not generate until one succeeds."""

    @abstractmethod
    async def publish(self, report: dict[str, Any]) -> None:
        """Leader only: leaves ``SyncReport.as_dict()`` where the trainer fetches it."""

    @abstractmethod
    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        """Leader only: replaces the adapter that the engine serves.

        Args:
            settings: fields of PEFT's ``LoraConfig``, which ``refuse_adapter`` has accepted.
            factors: by their names in an adapter checkpoint; on the host.
            weight_version: see ``start_load``.

        Raises:
            RuntimeError: the engine refused it.
        """

    @abstractmethod
    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        """Leader only: makes the engine call our loader on all its ranks; returns at once."""

    @abstractmethod
    def flush_behind_load(self) -> None:
        """Leader only: all engine ranks are in the load. If none of the engine's memory is released then, it is told to
        flush its prefix cache as soon as it has left the load, for ``finish`` to find that done; returns at once."""

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:  # noqa: B027
        """Any rank: refuses a model whose embedding and head the engine cannot hold apart; by default it can.

        Args:
            architectures: of the model's config.
            where: what adapts or trains one of the two, for the message.

        Raises:
            ValueError: names the architecture, the reason and the remedy.
        """

    def refuse_adapter(self, settings: Mapping[str, Any]) -> None:  # noqa: B027
        """Any rank: refuses an adapter that the engine cannot serve itself; by default it serves any.

        Args:
            settings: fields of PEFT's ``LoraConfig``.

        Raises:
            ValueError: names the setting, its value and the remedy.
        """


async def abandon(endpoint: RolloutEndpoint, why: str) -> None:
    """Keeps the engine from generating until a sync succeeds.

    Args:
        endpoint: of any rank; only a leader does anything.
        why: the failure.
    """
    if endpoint.leader:
        try:
            await endpoint.abandon(why)
        except Exception as error:
            say(f"the engine was not told of the failed sync: {error!r}")


async def leave(pending: PendingLoad | None, timeout: float) -> None:
    """Lets the engine leave a load that was given up, so that the next sync finds it idle.

    Args:
        pending: the leader's load, if there is one.
        timeout: seconds that the engine may take.
    """
    if pending is not None:
        try:
            await pending.outcome(timeout)
        except Exception as error:
            say(f"the engine ended the failed sync with {error!r}")
