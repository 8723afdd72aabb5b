# SPDX-License-Identifier: Apache-2.0
"""verl's rollout server actor, as the sharding manager sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.families import refuse_untied
from verl_sync_plugin.rollouts.sglang.served_lora import (
    pack_adapter,
    refuse_adapter,
    refuse_experts,
    served_settings,
    summary,
)
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest


class ServerActorEndpoint(RolloutEndpoint):
    """One of the ranks beside one ``SyncSGLangHttpServer``.

    Args:
        server: handle of the server actor; only the leader's is used.
        place: of this rank among them; the first leads.
        ranks: see ``RolloutEndpoint``.
        restores_uncovered: see ``RolloutEndpoint``.
        timeout_seconds: bound on every call of the server.
        awake_behind_load: nothing is left to be resumed after a load.
        after_death: what a user is told to do once the server has died.
    """

    name = "SGLang"

    def __init__(
        self,
        server: Any,
        place: int,
        ranks: tuple[int, ...],
        restores_uncovered: bool,
        timeout_seconds: float,
        awake_behind_load: bool,
        after_death: str = "",
    ) -> None:
        self._server = server
        self._place = place
        self._ranks = ranks
        self._restores = restores_uncovered
        self._timeout = timeout_seconds
        self._awake_behind_load = awake_behind_load
        self._after_death = after_death

    @property
    def leader(self) -> bool:
        return self._place == 0

    @property
    def restores_uncovered(self) -> bool:
        return self._restores

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    async def _bounded(self, reference: ray.ObjectRef) -> Any:
        return await _answer(reference, self._timeout, self._after_death)

    async def resume(self, tags: list[str]) -> None:
        await self._bounded(self._server.resume_tags.remote(tags))

    async def finish(self, tags: list[str]) -> None:
        """Stage 2: resumes ``tags`` and flushes the prefix cache once."""
        await self._bounded(self._server.finish_sync.remote(tags))

    async def abandon(self, why: str) -> None:
        await self._bounded(self._server.abandon_sync.remote(why))

    async def publish(self, report: dict[str, Any]) -> None:
        """Leaves a report where the trainer fetches it."""
        await self._bounded(self._server.put_sync_report.remote(report))

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        refuse_experts(factors)
        packed, served = pack_adapter(factors), served_settings(settings, factors)
        slept = await self._bounded(self._server.load_adapter.remote(served, packed, summary(factors), weight_version))
        return LoadOutcome(slept, len(packed))

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        reference = self._server.load_weights.remote(request.to_wire(), weight_version)
        return _ActorLoad(reference, partial(self._server.complaints.remote, request.sync_id), self._after_death)

    def flush_behind_load(self) -> None:
        if self._awake_behind_load:
            self._server.flush_behind_load.remote()

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        refuse_untied(architectures, where)

    def refuse_adapter(self, settings: Mapping[str, Any]) -> None:
        refuse_adapter(settings, {})


class _ActorLoad(PendingLoad):
    def __init__(self, reference: ray.ObjectRef, ask: Callable[[], ray.ObjectRef], after_death: str) -> None:
        self._reference = reference
        self._ask = ask
        self._after_death = after_death

    def finished(self) -> bool:
        ready, _ = ray.wait([self._reference], timeout=0)
        return bool(ready)

    async def complaints(self, timeout: float) -> list[str]:
        return list(await _answer(self._ask(), timeout, self._after_death))

    async def outcome(self, timeout: float) -> LoadOutcome:
        return LoadOutcome(sleep_seconds=float(await _answer(self._reference, timeout, self._after_death)))


async def _answer(reference: ray.ObjectRef, timeout: float, after_death: str) -> Any:
    """What a call of the server actor returns.

    Raises:
        TimeoutError: it has not within ``timeout`` seconds.
        RuntimeError: the server has died; ends with ``after_death``.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)
    except asyncio.TimeoutError as error:  # not the built-in one before Python 3.11
        raise TimeoutError(
            f"the rollout server did not answer within {timeout:g} s ({KEY_PREFIX}.timeout_seconds); see SGLang's log"
        ) from error
    except RayActorError as error:
        said = str(error).strip().splitlines()[0]
        raise RuntimeError(f"the rollout server died, and its engine with it ({said}); {after_death}") from error
