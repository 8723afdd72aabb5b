# SPDX-License-Identifier: Apache-2.0
"""What becomes of a paused server when a sync fails, with a tokenizer manager that only notes what it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from noting_manager import ABORTING, Manager, loaded, synced

from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts.sglang import pause as pausing
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE

Make = Callable[..., Any]


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_who_resumes_during_a_load_waits_for_its_end(pause: str, server_with: Make) -> None:
    """A load that nobody has given up yet may be half done all the same."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        for ends, version in ((server.abandon_sync("the trainer died"), 7), (server.finish_sync([]), 8)):
            await server.load_weights(("sync",), str(version))
            manager.asked.clear()
            resumed = asyncio.ensure_future(server.resume_generation())
            await asyncio.sleep(0.01)
            assert "continue" not in manager.asked and not resumed.done()
            await ends
            (answer,) = await asyncio.gather(resumed, return_exceptions=True)
            assert isinstance(answer, HalfWrittenError) is (version == 7) is ("continue" not in manager.asked)

    asyncio.run(story())


@pytest.mark.parametrize("load", ["load_weights", "load_adapter"])
def test_a_sync_that_is_given_up_while_requests_end_is_not_loaded(load: str, server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort")
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(
            getattr(server, load)(*{"load_weights": (("s",), "7")}.get(load, ({}, b"", [], "7")))
        )
        await asyncio.sleep(0.01)
        assert manager.aborted and manager.asked == []
        await server.abandon_sync("the trainer gave up")
        manager.answers.set()
        with pytest.raises(RuntimeError, match="gave this sync up"):
            await loading
        assert manager.asked == ["pause abort"] and (await call).token_ids == [1]
        with pytest.raises(HalfWrittenError):
            await server.generate([1], {"max_new_tokens": 1}, "request")

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_a_pause_that_fails_holds_nobody(pause: str, server_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        manager = Manager()
        manager.answers.set()
        server = server_with(manager, pause)
        monkeypatch.setattr(manager, "pause_generation", AsyncMock(side_effect=OSError("SGLang is gone")))
        with pytest.raises(OSError, match="SGLang is gone"):
            await server.abort_all_requests()
        assert (await asyncio.wait_for(server.generate([1], {"max_new_tokens": 1}, "request"), 1)).token_ids == [1]

    asyncio.run(story())


def test_a_driver_that_takes_over_behind_a_failed_load_resumes_the_cache_first(server_with: Make) -> None:
    """Generation without its memory would end the engine."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort")
        await server.load_weights(("sync",), "7")
        await server.abandon_sync("a replica died")
        await synced(server, 8)
        assert manager.asked[2:] == ABORTING

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_nothing_goes_on_behind_a_failed_sync(pause: str, server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        await server.abort_all_requests()
        await server.load_weights(("sync",), "7")
        await server.abandon_sync("another rank failed")
        with pytest.raises(RuntimeError, match="half written: another rank failed"):
            await server.resume_generation()
        assert "continue" not in manager.asked
        await synced(server)
        assert manager.asked[-1] == "continue"

    asyncio.run(story())


def test_a_sync_that_nobody_ends_is_waited_for_with_a_bound(server_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "together_seconds", lambda seconds: 0.01)

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "retract")
        await server.load_weights(("sync",), "7")
        with pytest.raises(HalfWrittenError, match=r"under way for 0\.01 s, and nobody has said that it is over"):
            await server.resume_generation()
        assert "continue" not in manager.asked
        await loaded(server, 8)
        assert manager.asked[-1] == "continue"

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_late_end_of_a_sync_that_was_given_up_is_not_that_of_the_next(
    pause: str, fails: bool, server_with: Make
) -> None:
    """The server stood still in the last step of a sync: behind it come that the sync was given up, and the next load,
    during which the step goes on."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        resumed = asyncio.Event()

        async def resume(obj: Any, request: None) -> None:
            await resumed.wait()
            if fails:
                raise OSError("SGLang is gone")

        await server.sleep()
        await server.load_weights(("sync",), "1")
        manager.resume_memory_occupation = resume  # type: ignore[method-assign]
        late = asyncio.ensure_future(server.finish_sync([KV_CACHE]))
        await asyncio.sleep(0)
        await server.abandon_sync("no answer")
        await server.load_weights(("sync",), "2")
        resumed.set()
        (answer,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(answer, OSError if fails else RuntimeError), answer
        assert server.global_steps is None and "continue" not in manager.asked
        del manager.resume_memory_occupation  # type: ignore[method-assign]
        await server.finish_sync([])
        assert server.global_steps == 2 and manager.asked[-1] == "continue"

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("wakes", [False, True])
def test_an_engine_that_a_driver_has_put_to_sleep_goes_on_with_all_its_memory(
    pause: str, wakes: bool, server_with: Make
) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        for version in (1, 2):
            manager.asked.clear()
            await server.sleep()
            assert manager.asked == ["release kv_cache"], "no sync resumes the weights of a separate rollout"
            if wakes:
                await server.wake_up()
                assert manager.asked[1] == "resume kv_cache"
            await loaded(server, version)
            resumed = [each for each in manager.asked if each.startswith("resume")]
            assert len(resumed) == 1 and not server.occupation.state.released
            assert manager.asked.index(resumed[0]) < manager.asked.index("continue")

    asyncio.run(story())
