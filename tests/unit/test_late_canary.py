# SPDX-License-Identifier: Apache-2.0
"""A canary that outlives its sync: SGLang ends its processes when it is to sleep while a request is running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.gate import WeightsGate
from verl_sync_plugin.rollouts.sglang.occupation import Occupation
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

BOUND = 0.3
LOG_PROBS = {"input_token_logprobs": [(None,), (-1.0,)], "output_token_logprobs": [(-2.0,)]}
ANSWER = {"output_ids": [3], "meta_info": LOG_PROBS}


class Manager:
    """SGLang's tokenizer manager: answers when it is told to, and is busy for one flush behind an answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()
        self._running = False

    async def generate_request(self, request: Any, raw: None) -> AsyncIterator[list[dict[str, Any]]]:
        self.asked.append("score")
        self._running = True
        await self.goes_on.wait()
        yield [ANSWER]

    async def flush_cache(self) -> Any:
        self.asked.append("flush")
        was, self._running = self._running, False
        return SimpleNamespace(success=not was)

    async def release(self, tags: list[str]) -> None:
        assert not self._running, "SGLang would end its processes"
        self.asked.append("release")


def _server(manager: Manager) -> Any:
    gate, occupation = WeightsGate(), Occupation(BOUND)
    gate.begin()
    return SimpleNamespace(
        lora_as_adapter=False,
        tokenizer_manager=manager,
        guarded=SimpleNamespace(past_gate=manager.generate_request),
        _gate=gate,
        occupation=occupation,
    )


def test_an_engine_is_put_to_sleep_when_a_late_canary_has_ended() -> None:
    async def late() -> None:
        manager = Manager()
        server = _server(manager)
        scoring = asyncio.ensure_future(SyncSGLangHttpServer.score(server, [[1, 2]], 1))
        await asyncio.sleep(0)
        server._gate.fail("the canary took too long")
        with pytest.raises(
            TimeoutError, match=rf"SGLang did not release weights .*{KEY_PREFIX}\.timeout_seconds=0\.3"
        ) as e:
            await server.occupation.release(["weights"], manager.release)
        assert "it had not answered the canary of an earlier sync" in str(e.value)
        assert manager.asked == ["score"]
        sleeping = asyncio.ensure_future(server.occupation.release(["weights"], manager.release))
        await asyncio.sleep(0)
        manager.goes_on.set()
        with pytest.raises(RuntimeError, match="gave this sync up"):
            await scoring
        await sleeping
        assert manager.asked == ["score", "flush", "flush", "release"], "nothing more is asked for that sync"

    asyncio.run(late())


def test_a_canary_that_comes_when_its_sync_was_given_up_asks_nothing() -> None:
    async def later() -> None:
        manager = Manager()
        server = _server(manager)
        server._gate.fail("the server was stopped")
        with pytest.raises(RuntimeError, match="gave this sync up"):
            await SyncSGLangHttpServer.score(server, [[1, 2]], 1)
        assert not manager.asked

    asyncio.run(later())


def test_a_canary_in_time_is_answered_and_leaves_the_engine_at_rest() -> None:
    async def now() -> None:
        manager = Manager()
        manager.goes_on.set()
        scored = await SyncSGLangHttpServer.score(_server(manager), [[1, 2]], 1)
        assert scored == ([[-1.0]], [[-2.0]], [[-1.0]])
        assert manager.asked == ["score", "flush", "flush"] * 2

    asyncio.run(now())


def test_a_prompt_that_is_refused_leaves_the_engine_at_rest() -> None:
    """SGLang goes on with the other prompts, and would end if it were put to sleep then."""

    async def refused() -> None:
        manager = Manager()

        async def refusing(request: Any, raw: None) -> AsyncIterator[Any]:
            manager._running = True
            raise ValueError("injected: too long")
            yield

        manager.generate_request = refusing  # type: ignore[method-assign]
        server = _server(manager)
        with pytest.raises(ValueError, match="injected: too long"):
            await SyncSGLangHttpServer.score(server, [[1, 2]], 1)
        await server.occupation.release(["weights"], manager.release)
        assert manager.asked == ["flush", "flush", "release"]

    asyncio.run(refused())
