# SPDX-License-Identifier: Apache-2.0
"""An engine is told once of a sync that failed, whatever failed, and one that is silent is not waited for twice."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_meeting import WAIT, Comer, Loading
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.protocol import LoadRequest

CPU = torch.device("cpu")


class SilentLoad(Loading):
    async def outcome(self, timeout: float) -> LoadOutcome:
        await asyncio.sleep(timeout)
        raise TimeoutError


class Silent(Comer):
    """A server that answers nothing of what it is asked; ``asked`` has all of it."""

    restores_uncovered = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def _no_answer(self, what: str) -> None:
        self.asked.append(what)
        await asyncio.sleep(WAIT)
        raise TimeoutError(f"no answer to {what}")

    async def resume(self, tags: list[str]) -> None:
        await self._no_answer("resume")

    async def finish(self, tags: list[str]) -> None:
        await self._no_answer("finish")

    async def abandon(self, why: str) -> None:
        await self._no_answer(f"abandon: {why}")

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        self.asked.append("load")
        return SilentLoad()


class WithoutSource(ShardingManager):
    def open_source(self) -> ParameterSource:
        raise ValueError("no source")


class Serving(ShardingManager):
    """Its engine, which began with the checkpoint, is to get an adapter."""

    def __init__(self, *args: Any) -> None:
        self.trainer: Any = SimpleNamespace(serves_adapter=True, device=CPU)
        super().__init__(*args)

    def open_source(self) -> ParameterSource:
        raise ValueError("no source")


def fail(where: str) -> tuple[str, list[str], float]:
    """The error of one call of a manager, what the engine was asked for meanwhile, and the seconds it took."""
    engine = Silent()
    kind = Serving if where in ("adapter", "base") else WithoutSource
    manager: Any = kind(None, engine, SyncConfig(timeout_seconds=WAIT), 1 << 20, CPU)
    manager._base_sent = where == "adapter"
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        asyncio.run(manager.finish(["kv_cache"]) if where == "finish" else manager.update_weights([], 1))
    seconds = time.monotonic() - started
    dist.barrier()
    return str(caught.value), engine.asked, seconds


# The base travels before the adapter, whatever the engine loaded at its start
CASES = [("plan", ["load"]), ("base", ["load"]), ("adapter", []), ("finish", ["finish"])]


@pytest.mark.parametrize(("where", "asked"), CASES)
def test_a_silent_engine_is_told_once_and_waited_for_once(where: str, asked: list[str]) -> None:
    """While it also does not end the load that it was asked for."""
    (text, leader, seconds), (same, other, _) = run_world(2, fail, where, timeout=60)
    assert text == same and other == []
    assert leader == [*asked, f"abandon: {text}"]
    assert seconds < (2.5 if where == "finish" else 1.5) * WAIT
