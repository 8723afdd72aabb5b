# SPDX-License-Identifier: Apache-2.0
"""Requests that come past verl, over SGLang's HTTP endpoints, while our server actor's engine sleeps and is synced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bare_engine.endpoint import BareEngine
from contract.pause_world import PROMPTS, Models, PlainRun, PlainServer, end_serving, serving
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS

pytest_plugins = ("contract.pause_world",)
pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
Play = Callable[[Callable[["HttpRun"], Any]], None]


class HttpRun(PlainRun):
    """Of a colocated rollout, or of a separate one; and a client of its HTTP server."""

    def __init__(self, server: Any, client: httpx.AsyncClient) -> None:
        super().__init__(server)
        self._client = client

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self._client.post(path, json=body)

    def asking(self, tokens: int = 20) -> asyncio.Task[httpx.Response]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": PROMPTS[0], "sampling_params": sampling}
        return asyncio.ensure_future(self.post("/generate", body))

    async def waits(self, *asked: asyncio.Task[httpx.Response]) -> None:
        await asyncio.sleep(0.5)  # an answer takes less
        assert not any(each.done() for each in asked)

    async def sync(self, version: int) -> None:
        """What a colocated rollout does in a sync: it sleeps, and wakes in two stages."""
        await self.server.sleep()
        await self.load(version)
        await self.server.finish_sync([KV_CACHE])

    async def load(self, version: int) -> None:
        await self.server.resume_tags([WEIGHTS])
        await self.server.load_weights((version,), str(version))


@asynccontextmanager
async def client_of(engine: BareEngine) -> Any:
    """SGLang's own endpoints, without the socket before them."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    inside, app = engine.engine, http_server.app
    state = http_server._GlobalState(inside.tokenizer_manager, inside.template_manager, {})
    http_server.set_global_state(state)
    app.state.openai_serving_completion = OpenAIServingCompletion(inside.tokenizer_manager, inside.template_manager)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        yield client


@pytest.fixture
def play(engine: BareEngine, models: Models, plain_loads: None) -> Iterator[Callable[..., None]]:
    """Runs a story in the engine's loop, on a server that was launched and never synced."""

    def run(story: Callable[[HttpRun], Any], separate: bool = False) -> None:
        async def whole() -> None:
            server = serving(engine, models.path, "abort", PlainServer, separate)
            async with client_of(engine) as client:
                await story(HttpRun(server, client))

        engine.call(asyncio.wait_for(whole(), 120))

    yield run
    end_serving(engine)


def check(models: Models, answer: httpx.Response, version: int) -> None:
    assert answer.status_code == 200, answer.text
    tokens, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    assert meta["weight_version"] == str(version) and len(tokens) == 20
    chosen = {1: models.chosen_until(PROMPTS[0], tokens) == 20, 2: models.chosen_by_second(PROMPTS[0], tokens, 0, 0)}
    assert chosen == {version: True, 3 - version: False}


@pytest.mark.parametrize("separate", [False, True], ids=["colocated", "separate"])
def test_before_the_first_sync_they_wait_for_it(separate: bool, play: Callable[..., None], models: Models) -> None:
    """The weights that the engine was launched with are made up, or of another version than the trainer's."""

    async def story(run: HttpRun) -> None:
        asked = run.asking()
        await run.waits(asked)
        if separate:
            await run.server.abort_all_requests()
            await PlainRun.sync(run, 2)
            await run.waits(asked)
            await run.server.resume_generation()
        else:
            await run.sync(2)
        check(models, await asked, 2)

    play(story, separate)


def test_while_the_engine_sleeps_and_is_synced_they_wait(play: Play, models: Models) -> None:
    async def story(run: HttpRun) -> None:
        await run.sync(1)
        check(models, await run.asking(), 1)
        await run.server.sleep()
        asked = [run.asking()]
        await run.waits(*asked)
        await run.server.resume_tags([WEIGHTS, KV_CACHE])
        await run.waits(*asked)  # the weights that were released are gone
        await run.load(2)
        asked.append(run.asking())
        await run.waits(*asked)
        await run.waits(*asked)
        await run.server.finish_sync([])
        for each in asked:
            check(models, await each, 2)

    play(story)


def test_behind_a_sync_that_failed_they_are_refused_until_one_succeeds(play: Play, models: Models) -> None:
    async def story(run: HttpRun) -> None:
        await run.sync(1)
        await run.server.sleep()
        waiting = run.asking()
        await run.load(2)
        await run.waits(waiting)
        await run.server.abandon_sync("injected: another rank failed")
        body = {"model": "any", "prompt": PROMPTS[0], "max_tokens": 4}
        for answer in (await waiting, await run.asking(), await run.post(COMPLETIONS, body)):
            assert answer.status_code == 503 and "half written: injected: another rank failed" in answer.text
        await run.load(2)
        await run.server.finish_sync([KV_CACHE])
        check(models, await run.asking(), 2)

    play(story)


@pytest.mark.parametrize("sleeps", [True, False], ids=["asleep", "awake"])
def test_those_in_flight_come_back_when_a_sync_begins(sleeps: bool, play: Play, models: Models) -> None:
    """SGLang would end itself if it were to release memory with a request inside, and load only when all have ended."""

    async def story(run: HttpRun) -> None:
        await run.sync(1)
        asked = [*await run.in_flight(), run.asking(180)]
        await asyncio.sleep(0.05)
        if sleeps:
            await run.server.sleep()
        await run.load(2)
        assert (await asked[-1]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await asyncio.gather(*asked)
        await run.server.finish_sync([KV_CACHE])
        check(models, await run.asking(), 2)

    play(story)


def test_memory_that_was_released_late_holds_them(play: Play, models: Models) -> None:
    """SGLang answers a release after whoever asked for it has given up."""

    async def story(run: HttpRun) -> None:
        await run.sync(1)
        server, manager = run.server, run.server.tokenizer_manager
        honest, late = manager.release_memory_occupation, asyncio.Event()

        async def release(*given: Any) -> Any:
            await late.wait()
            return await honest(*given)

        manager.release_memory_occupation = release
        server.occupation._timeout = 0.2
        try:
            with pytest.raises(TimeoutError, match="SGLang did not release"):
                await server.sleep()
        finally:
            del manager.release_memory_occupation
        asked = run.asking()
        await run.waits(asked)
        late.set()
        await run.waits(asked)
        server.occupation._timeout = 60.0
        await run.load(2)
        await server.finish_sync([KV_CACHE])
        check(models, await asked, 2)

    play(story)
