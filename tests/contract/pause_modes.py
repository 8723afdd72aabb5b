# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests in a real SGLang engine while our server actor's calls sync its weights: of requests in
flight by the mode, paused by a driver or by the load itself, and of those that come over SGLang's HTTP endpoints."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bare_engine.endpoint import BareEngine
from contract.pause_world import PROMPTS, STALL, Models, Play, Requests, Run, check_cut_off, check_spanning
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS

pytest_plugins = ("contract.pause_world",)
pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_stay_in_the_engine_and_go_on_with_new_weights(pause: str, play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
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
    async def story(run: Run) -> None:
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


async def check_answers(run: Run, models: Models, pause: str, asked: list[asyncio.Task[Any]]) -> None:
    """What became of the requests in flight, and that the engine goes on with new weights, by itself."""
    outputs = await asyncio.gather(*asked[:-1])
    await asked[-1]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if pause == "abort":
            check_cut_off(models, prompt, output)
        else:
            check_spanning(models, prompt, output, pause)
    assert run.told == ((None, "1") if pause == "abort" else (["1", "2"], "2"))
    await check_new(models, pause, run.ask(PROMPTS[0], 20))


async def check_new(models: Models, pause: str, answer: Any) -> None:
    """An answer that was begun with version 2."""
    output = await answer
    fields = output.extra_fields
    assert fields["global_steps"] == 2 and len(output.token_ids) == 20
    if pause != "abort":
        assert fields["min_global_steps"] == fields["max_global_steps"] == 2
    assert models.chosen_by_second(PROMPTS[0], output.token_ids, 0, 0)


@EVERY
def test_a_load_pauses_the_engine_by_itself_and_nothing_is_generated_in_its_middle(
    pause: str, play: Play, engine: BareEngine, models: Models, tmp_path: Path
) -> None:
    """While a group stands, no driver pauses the engine."""

    async def story(run: Run) -> None:
        await engine.ask_loader(STALL, str(tmp_path))
        asked = await run.in_flight()
        loading = asyncio.ensure_future(run.load(2))
        while not (tmp_path / "stalled").exists():
            assert not loading.done(), "the load did not stand still"
            await asyncio.sleep(0.005)
        if pause == "abort":
            await asyncio.gather(*asked)  # all of them have come back
        new = asyncio.ensure_future(run.ask(PROMPTS[0], 20))
        other = Requests(run.server)
        over_http = asyncio.ensure_future(other.pace(20))
        await run.stand_still([new, over_http, *(asked if pause != "abort" else [])])
        assert other.paced == 0 and not loading.done()
        (tmp_path / "go").touch()
        await loading
        await run.server.finish_sync([])
        await over_http
        assert other.told == ((None if pause == "abort" else ["2"]), "2")
        await check_new(models, pause, new)
        await check_answers(run, models, pause, asked)

    play(pause, story)


@EVERY
def test_requests_wait_behind_a_load_that_fails_until_one_succeeds(pause: str, play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
        asked = await run.in_flight()
        await run.load(2)
        await run.server.abandon_sync("injected: another rank failed")
        with pytest.raises(HalfWrittenError, match="injected: another rank failed"):
            await run.ask(PROMPTS[0])
        if pause != "abort":
            await run.stand_still(asked)
        await run.load(2)
        await run.server.finish_sync([])
        await check_answers(run, models, pause, asked)

    play(pause, story)


def check(models: Models, answer: httpx.Response, version: int) -> None:
    assert answer.status_code == 200, answer.text
    tokens, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    assert meta["weight_version"] == str(version) and len(tokens) == 20
    chosen = {1: models.chosen_until(PROMPTS[0], tokens) == 20, 2: models.chosen_by_second(PROMPTS[0], tokens, 0, 0)}
    assert chosen == {version: True, 3 - version: False}


@pytest.mark.parametrize("separate", [False, True], ids=["colocated", "separate"])
def test_before_the_first_sync_they_wait_for_it(separate: bool, play: Play, models: Models) -> None:
    """The weights that the engine was launched with are made up, or of another version than the trainer's."""

    async def story(run: Run) -> None:
        asked = run.asking()
        await run.waits(asked)
        if separate:
            await run.server.abort_all_requests()
            await run.sync(2)
            await run.waits(asked)
            await run.server.resume_generation()
        else:
            await run.sleep_and_wake(2)
        check(models, await asked, 2)

    play("abort", story, separate, synced=False)


def test_while_the_engine_sleeps_and_is_synced_they_wait(play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
        await run.sleep_and_wake(1)
        check(models, await run.asking(), 1)
        await run.server.sleep()
        asked = [run.asking()]
        await run.waits(*asked)
        await run.server.resume_tags([WEIGHTS, KV_CACHE])
        await run.waits(*asked)  # the weights that were released are gone
        await run.wake(2)
        asked.append(run.asking())
        await run.waits(*asked)
        await run.waits(*asked)
        await run.server.finish_sync([])
        for each in asked:
            check(models, await each, 2)

    play("abort", story, separate=False, synced=False)


def test_behind_a_sync_that_failed_they_are_refused_until_one_succeeds(play: Play, models: Models) -> None:
    async def story(run: Run) -> None:
        await run.sleep_and_wake(1)
        await run.server.sleep()
        waiting = run.asking()
        await run.wake(2)
        await run.waits(waiting)
        await run.server.abandon_sync("injected: another rank failed")
        body = {"model": "any", "prompt": PROMPTS[0], "max_tokens": 4}
        for answer in (await waiting, await run.asking(), await run.client.post("/v1/completions", json=body)):
            assert answer.status_code == 503 and "half written: injected: another rank failed" in answer.text
        await run.wake(2)
        await run.server.finish_sync([KV_CACHE])
        check(models, await run.asking(), 2)

    play("abort", story, separate=False, synced=False)


@pytest.mark.parametrize("sleeps", [True, False], ids=["asleep", "awake"])
def test_those_in_flight_come_back_when_a_sync_begins(sleeps: bool, play: Play, models: Models) -> None:
    """SGLang would end itself if it were to release memory with a request inside, and load only when all have ended."""

    async def story(run: Run) -> None:
        await run.sleep_and_wake(1)
        asked = [*await run.in_flight(), run.asking(180)]
        await asyncio.sleep(0.05)
        if sleeps:
            await run.server.sleep()
        await run.wake(2)
        assert (await asked[-1]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await asyncio.gather(*asked)
        await run.server.finish_sync([KV_CACHE])
        check(models, await run.asking(), 2)

    play("abort", story, separate=False, synced=False)


def test_memory_that_was_released_late_holds_them(play: Play, models: Models) -> None:
    """SGLang answers a release after whoever asked for it has given up."""

    async def story(run: Run) -> None:
        await run.sleep_and_wake(1)
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
        await run.wake(2)
        await server.finish_sync([KV_CACHE])
        check(models, await asked, 2)

    play("abort", story, separate=False, synced=False)
