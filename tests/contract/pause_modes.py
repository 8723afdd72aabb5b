# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests in flight in a real SGLang engine while our server actor's calls sync its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bare_engine.endpoint import BareEngine
from contract.pause_world import (
    PROMPTS,
    Models,
    PlainRun,
    PlainServer,
    check_cut_off,
    check_spanning,
    end_serving,
    serving,
)

pytest_plugins = ("contract.pause_world",)
pytestmark = pytest.mark.slow

Play = Callable[[str, Callable[[PlainRun], Any]], None]


@pytest.fixture
def play(engine: BareEngine, models: Models, plain_loads: None) -> Iterator[Play]:
    """Runs a story in the engine's loop, on a server of the given mode, from version 1 on."""

    def run(pause: str, story: Callable[[PlainRun], Any]) -> None:
        server = serving(engine, models.path, pause, PlainServer)

        async def whole() -> None:
            run = PlainRun(server)
            await run.server.abort_all_requests()
            await run.sync(1)
            await run.server.resume_generation()
            await story(run)

        engine.call(asyncio.wait_for(whole(), 120))

    yield run
    end_serving(engine)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_stay_in_the_engine_and_go_on_with_new_weights(pause: str, play: Play, models: Models) -> None:
    async def story(run: PlainRun) -> None:
        server, asked = run.server, await run.in_flight()
        await server.abort_all_requests()
        await run.stand_still(asked)
        new = asyncio.ensure_future(run.ask(PROMPTS[0], 20))
        await asyncio.sleep(0.05)
        await run.sync(2)
        await run.stand_still([*asked, new])
        await server.resume_generation()
        outputs = await asyncio.gather(*asked[:-1])
        await asked[-1]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            check_spanning(models, prompt, output, pause)
        for output in (await new, await run.ask(PROMPTS[1], 20)):
            assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 2
        assert run.told == (["1", "2"], "2"), "as over HTTP: a response that spans a sync says so"
        await run.pace()
        assert run.told == (["2"], "2")
        assert models.chosen_by_second(PROMPTS[0], (await new).token_ids, 0, 0), "a prefix of old weights was used"

    play(pause, story)


def test_aborted_requests_come_back_with_what_they_have(play: Play, models: Models) -> None:
    async def story(run: PlainRun) -> None:
        asked, began = await run.in_flight(), time.perf_counter()
        await run.server.abort_all_requests()
        took = time.perf_counter() - began
        assert took < 0.9, f"{took:.2f} s: SGLang's own pause takes a second with a request in flight"
        print(f"paused after {took:.3f} s")
        for prompt, output in zip(PROMPTS, await asyncio.gather(*asked[:-1]), strict=True):
            check_cut_off(models, prompt, output)
        await run.sync(2)
        await run.server.resume_generation()
        output = await run.ask(PROMPTS[0], 20)
        assert models.chosen_by_second(PROMPTS[0], output.token_ids, 0, 0)

    play("abort", story)
