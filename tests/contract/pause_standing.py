# SPDX-License-Identifier: Apache-2.0
"""Requests in flight while a group that stands is synced: no driver pauses the engine, its server does for the load.

Trainer rank, rollout rank, server, loader and engine are real; only Ray's calls go through pipes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bare_engine.endpoint import BareEngine
from contract.pause_group import Group, Stall
from contract.pause_world import PROMPTS, Models, Requests, check_cut_off, check_spanning, end_serving, serving
from verl_sync_plugin.errors import HalfWrittenError

pytest_plugins = ("contract.pause_world",)
pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])


@pytest.fixture(scope="module")
def group(engine: BareEngine, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(engine, models, tmp_path_factory.mktemp("trainer"))
    try:
        group.ready()
        yield group
    finally:
        group.end()


Play = Callable[..., None]


@pytest.fixture
def play(engine: BareEngine, models: Models, group: Group, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Runs a story in the engine's loop, on a server of the given mode, with version 1 in the engine and version 2 in
    the trainer; the group stands, and its next sync is read in place or staged."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(pause: str, story: Callable[[Requests], Any], in_place: bool = True) -> None:
        group.server = serving(engine, models.path, pause)

        async def whole() -> None:
            await group.learn(1)
            await group.sync(1)
            await group.read_in_place(in_place)
            await group.learn(2)
            await story(Requests(group.server))

        engine.call(asyncio.wait_for(whole(), 120))
        assert group.report["global_steps"] == 2 and bool(group.report["direct_bytes"]) == in_place, group.report

    yield run
    end_serving(engine)


async def check_answers(run: Requests, models: Models, pause: str, asked: list[asyncio.Task[Any]]) -> None:
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
def test_a_load_pauses_the_engine_with_requests_in_flight(pause: str, play: Play, group: Group, models: Models) -> None:
    async def story(run: Requests) -> None:
        asked = await run.in_flight()
        await group.sync(2)
        await check_answers(run, models, pause, asked)

    play(pause, story)


@pytest.fixture
def stall(engine: BareEngine, tmp_path: Path) -> Stall:
    return Stall(engine, tmp_path)


async def half_written(
    run: Requests, group: Group, stall: Stall
) -> tuple[list[asyncio.Task[Any]], asyncio.Future[Any]]:
    """Requests in flight, and the sync that found them and stands still in the middle of its load."""
    await stall.arm()
    asked = await run.in_flight()
    syncing = asyncio.ensure_future(group.sync(2))
    await stall.reached(syncing)
    return asked, syncing


@EVERY
@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_is_generated_in_the_middle_of_a_load(
    pause: str, in_place: bool, play: Play, group: Group, models: Models, stall: Stall
) -> None:
    """Between two buckets, or among the copies of a load in place."""

    async def story(run: Requests) -> None:
        asked, syncing = await half_written(run, group, stall)
        if pause == "abort":
            await asyncio.gather(*asked)  # all of them have come back
        new = asyncio.ensure_future(run.ask(PROMPTS[0], 20))
        other = Requests(group.server)
        over_http = asyncio.ensure_future(other.pace(20))
        await run.stand_still([new, over_http, *(asked if pause != "abort" else [])])
        assert other.paced == 0 and not syncing.done()
        stall.end()
        await syncing
        await over_http
        assert other.told == ((None if pause == "abort" else ["2"]), "2")
        await check_new(models, pause, new)
        await check_answers(run, models, pause, asked)

    play(pause, story, in_place)


@EVERY
def test_requests_wait_behind_a_load_that_fails_until_one_succeeds(
    pause: str, play: Play, group: Group, models: Models, stall: Stall
) -> None:
    async def story(run: Requests) -> None:
        asked, syncing = await half_written(run, group, stall)
        stall.end("injected: half of it is written")
        with pytest.raises(RuntimeError, match="injected: half of it is written"):
            await syncing
        with pytest.raises(HalfWrittenError, match="injected: half of it is written"):
            await run.ask(PROMPTS[0])
        if pause != "abort":
            await run.stand_still(asked)
        await group.sync(2)  # of a new group
        await check_answers(run, models, pause, asked)

    play(pause, story, in_place=False)
