# SPDX-License-Identifier: Apache-2.0
"""The rollout server actor on a tokenizer manager that answers in the order of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

Make = Callable[..., Any]


class Manager:
    """Answers in the order of its requests, as a scheduler does; the load ends when it is told to."""

    server_args = SimpleNamespace(tp_size=1, weight_version="")

    def __init__(self, flushes: bool = True, loads: bool = True) -> None:
        self.asked: list[str] = []
        self._loads = loads
        self.fed = asyncio.Event()
        self.hangs = 0  # so many of the next requests about memory get no answer before `goes_on`
        self.goes_on = asyncio.Event()
        self._flushes = flushes
        self._busy = asyncio.Lock()

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        self.asked.append("load")
        assert not obj.flush_cache, "SGLang ends its scheduler when it cannot flush there"
        async with self._busy:
            await self.fed.wait()
        return self._loads, "" if self._loads else "injected"

    async def flush_cache(self) -> Any:
        self.asked.append("flush")
        async with self._busy:
            return SimpleNamespace(success=self._flushes)

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        await self._answer(f"resume {','.join(obj.tags)}")

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        await self._answer(f"release {','.join(obj.tags)}")

    async def _answer(self, asked: str) -> None:
        self.asked.append(asked)
        self.hangs -= 1
        if self.hangs >= 0:
            await self.goes_on.wait()


def server_on(
    manager: Manager, model: str, released: tuple[str, ...] = (), timeout_seconds: float = 60.0
) -> SyncSGLangHttpServer:
    """Our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang; inside a loop, for
    that is where its locks belong."""
    sync = {"timeout_seconds": timeout_seconds}
    config = RolloutConfig(name="sglang", custom={"sync": sync}, max_model_len=64)
    server = SyncSGLangHttpServer(config, HFModelConfig(path=model), RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
    server.tokenizer_manager = manager
    server.occupation.state.note_released(released)
    return server
