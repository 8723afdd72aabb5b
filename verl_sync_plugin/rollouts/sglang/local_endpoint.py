# SPDX-License-Identifier: Apache-2.0
"""The engine of a script, as the sharding manager sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.families import refuse_untied
from verl_sync_plugin.rollouts.sglang.local import LocalEngine
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest


class LocalEndpoint(RolloutEndpoint):
    """One of the ranks beside one ``LocalEngine``.

    Args:
        engine: on the leader, which has started it; ``None`` on the others.
        ranks: see ``RolloutEndpoint``.
        restores_uncovered: see ``RolloutEndpoint``.
        timeout_seconds: bound on every call.
    """

    name = "SGLang"

    def __init__(
        self, engine: LocalEngine | None, ranks: tuple[int, ...], restores_uncovered: bool, timeout_seconds: float
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._restores = restores_uncovered
        self._timeout = timeout_seconds

    @property
    def leader(self) -> bool:
        return self._engine is not None

    @property
    def restores_uncovered(self) -> bool:
        return self._restores

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        assert self._engine is not None, "leader only"
        return self._engine.ask(method, *arguments)

    async def resume(self, tags: list[str]) -> None:
        await _answer(self._ask("resume_tags", tags), self._timeout)

    async def finish(self, tags: list[str]) -> None:
        await _answer(self._ask("finish_sync", tags), self._timeout)

    async def abandon(self, why: str) -> None:
        await _answer(self._ask("abandon_sync", why), self._timeout)

    async def publish(self, report: dict[str, Any]) -> None:
        """The script has the report already."""

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        raise AssertionError("adapters of a script are merged")

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        load = self._ask("load_weights", request.to_wire(), weight_version)
        return _LocalLoad(load, partial(self._ask, "complaints", request.sync_id))

    def flush_behind_load(self) -> None:
        self._ask("flush_behind_load")

    def refuse_untied(self, architectures: Iterable[str], where: str) -> None:
        refuse_untied(architectures, where)


class _LocalLoad(PendingLoad):
    def __init__(self, future: Future[Any], ask: Callable[[], Future[Any]]) -> None:
        self._future = future
        self._ask = ask

    def finished(self) -> bool:
        return self._future.done()

    async def complaints(self, timeout: float) -> list[str]:
        return list(await _answer(self._ask(), timeout))

    async def outcome(self, timeout: float) -> LoadOutcome:
        return LoadOutcome(sleep_seconds=float(await _answer(self._future, timeout)))


async def _answer(future: Future[Any], timeout: float) -> Any:
    """What the engine answers.

    Raises:
        TimeoutError: it has not within ``timeout`` seconds.
    """
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([waiting], timeout=timeout)
    if not done:
        raise TimeoutError(f"SGLang did not answer within {timeout:g} s ({KEY_PREFIX}.timeout_seconds); see its log")
    return waiting.result()
