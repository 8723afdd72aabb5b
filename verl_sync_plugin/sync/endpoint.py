# SPDX-License-Identifier: Apache-2.0
"""One trainer rank's view of its rollout engine; of no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.log import say
from verl_sync_plugin.transport.protocol import LoadRequest

# Calls a method of the engine's server with arguments; returns at once. A call under way cannot be cancelled
Call = Callable[..., Future[Any]]


class Engine(Protocol):
    """The part of ``rollouts.Rollout`` that the phase needs."""

    ENGINE: str

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None: ...
    def refuse_adapter(self, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None: ...
    def pack_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor]
    ) -> tuple[tuple[Any, ...], int]: ...


@dataclass(frozen=True)
class LoadOutcome:
    """The engine's answer at the end of a load.

    Attributes:
        sleep_seconds: how long the engine took to fall asleep before this sync; 0.0 when unknown.
        nbytes: bytes of an adapter as it travelled; 0 for a load that a trainer feeds.
    """

    sleep_seconds: float = 0.0
    nbytes: int = 0


class PendingLoad:
    """A load that runs in the engine while the trainer feeds it."""

    def __init__(self, endpoint: RolloutEndpoint, answer: Future[Any]) -> None:
        self._endpoint, self._answer = endpoint, answer

    def finished(self) -> bool:
        """True once the engine has answered; before the commit that means it failed."""
        return self._answer.done()

    async def outcome(self, timeout: float) -> LoadOutcome:
        """The engine's answer.

        Raises:
            RuntimeError: the engine refused or failed the update, or has died.
            TimeoutError: no answer within ``timeout`` seconds.
        """
        return LoadOutcome(sleep_seconds=float(await self._endpoint.answered(self._answer, timeout)))


class RolloutEndpoint:
    """Only the leader of an engine's ranks talks to the engine. What raises here raises RuntimeError when the engine
    refused, failed or has died, and TimeoutError when it did not answer in time.

    Args:
        engine: what is known of it.
        call: on the leader; ``None`` on all other ranks.
        ranks: global ranks next to the engine's ranks, in tensor-parallel order; none for a trainer rank of a separate
            run, which refuses for the engine all the same.
        restores_uncovered: what no sync writes comes back from a host copy of real (not dummy) weights.
        timeout_seconds: bound on every call.
        awake_after_load: nothing of the engine is left to be resumed once it has loaded.

    Attributes:
        name: of the engine, for messages.
        leader: this rank speaks for its engine.
    """

    name = "the engine"
    _engine: Engine | None = None  # refuses nothing

    def __init__(
        self,
        engine: Engine,
        call: Call | None,
        ranks: tuple[int, ...] = (),
        restores_uncovered: bool = False,
        timeout_seconds: float = 0.0,
        awake_after_load: bool = True,
    ) -> None:
        self.name, self.leader, self.ranks = engine.ENGINE, call is not None, ranks
        self.restores_uncovered = restores_uncovered
        self._engine, self._call = engine, call
        self._timeout, self._awake_after_load = timeout_seconds, awake_after_load

    def _start(self, method: str, *arguments: Any) -> Future[Any]:
        assert self._call is not None, "leader only"
        return self._call(method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self.answered(self._start(method, *arguments), self._timeout)

    async def answered(self, answer: Future[Any], timeout: float) -> Any:
        """Waits ``timeout`` seconds for the answer to a call."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), timeout)
        except asyncio.TimeoutError as error:  # not the built-in one before Python 3.11
            if answer.done():
                raise
            raise TimeoutError(
                f"{self.name} did not answer within {timeout:g} s ({KEY_PREFIX}.timeout_seconds); see its log"
            ) from error

    async def resume(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``; harmless when nothing is."""
        await self._ask("resume_tags", tags)

    async def finish(self, tags: list[str]) -> None:
        """Resumes what is released of ``tags``, then flushes the prefix cache once."""
        await self._ask("finish_sync", tags)

    async def abandon(self, why: str) -> None:
        """The sync failed; the engine must not generate until one succeeds."""
        await self._ask("abandon_sync", why)

    async def publish(self, report: dict[str, Any]) -> None:
        """Leaves ``SyncReport.as_dict()`` where the trainer fetches it."""
        await self._ask("put_sync_report", report)

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        """Replaces the adapter that the engine serves.

        Args:
            settings: fields of PEFT's ``LoraConfig``, which ``refuse_adapter`` has accepted.
            factors: by their names in an adapter checkpoint; on the host.
            weight_version: see ``start_load``.

        Raises:
            ValueError: the engine cannot serve it; names the setting and the remedy.
        """
        assert self._engine is not None, "leader only"
        arguments, nbytes = self._engine.pack_adapter(settings, factors)
        return LoadOutcome(await self._ask("load_adapter", *arguments, weight_version), nbytes)

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        """Makes the engine call our loader on all its ranks; returns at once."""
        return PendingLoad(self, self._start("load_weights", request.to_wire(), weight_version))

    def flush_behind_load(self) -> None:
        """All engine ranks are in the load. If none of the engine's memory is released then, it flushes its prefix
        cache as soon as it has left the load, for ``finish`` to find that done; returns at once."""
        if self._awake_after_load:
            self._start("flush_behind_load")

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        """Any rank: raises ValueError for a model whose embedding and head the engine cannot hold separately; ``where``
        says what adapts or trains one of the two."""
        if self._engine is not None:
            self._engine.refuse_untied(architectures, where)

    def refuse_adapter(self, settings: Mapping[str, Any]) -> None:
        """Any rank: raises ValueError for fields of PEFT's ``LoraConfig`` that the engine cannot serve."""
        if self._engine is not None:
            self._engine.refuse_adapter(settings, {})


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
            say(f"the engine did not hear of the failed sync: {error!r}")


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
