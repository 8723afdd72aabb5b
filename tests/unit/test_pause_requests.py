# SPDX-License-Identifier: Apache-2.0
"""What requests learn of a sync that they span, with a tokenizer manager that only notes what it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from noting_manager import Manager, loaded, synced
from sglang.srt.managers.io_struct import GenerateReqInput
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_sync_plugin.rollouts.sglang.pause import AGAIN_SECONDS

Make = Callable[..., Any]


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_call_that_spans_a_sync_names_both_versions(pause: str, server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        await synced(server, 6)
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await asyncio.sleep(0)
        await synced(server, 7)
        manager.answers.set()
        fields = (await call).extra_fields
        assert fields["global_steps"] == 7
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (6, 7)

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_call_during_the_pause_begins_behind_it(pause: str, server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        manager.answers.set()
        server = server_with(manager, pause)
        await server.abort_all_requests()
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await asyncio.sleep(0)
        await loaded(server, 7)
        await asyncio.sleep(0)
        assert manager.keys == []
        await server.resume_generation()
        assert (await call).extra_fields["min_global_steps"] == 7

    asyncio.run(story())


def test_requests_share_prefixes_of_the_same_weights_only(server_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGLangHttpServer, "launch_server", AsyncMock())  # the tokenizer manager is there

    async def story() -> None:
        manager = Manager()
        manager.answers.set()
        server = server_with(manager, "in_place")
        vars(manager).pop("generate_request")  # launching has them guarded
        await server.launch_server()
        for _ in range(2):
            await server.generate([1], {"max_new_tokens": 1}, "request")
            for given in ("salt", ["a", None]):  # SGLang's own door; verl's sets none
                request = GenerateReqInput(input_ids=[1], extra_key=given)  # type: ignore[arg-type]
                assert [answer async for answer in manager.generate_request(request)]
            await synced(server)
        first, second = manager.keys[:3], manager.keys[3:]
        assert first == ["weights-0:", "weights-0:salt", ["weights-0:a", "weights-0:"]]
        assert second == ["weights-1:", "weights-1:salt", ["weights-1:a", "weights-1:"]]
        await asyncio.sleep(0.01)
        assert manager.closed == len(manager.keys), "SGLang's lock is held as long as an answer stays open"

    asyncio.run(story())


async def loading_with_a_request_inside(server_with: Make) -> tuple[Manager, Any, Any, Any]:
    """A colocated engine that is awake: SGLang, the server, the request, and the load that waits for its end."""
    manager = Manager()
    server = server_with(manager, "abort", RolloutMode.HYBRID, "naive")
    call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
    await asyncio.sleep(0)
    return manager, server, call, asyncio.ensure_future(server.load_weights(("sync",), "7"))


def test_requests_that_outlive_an_abort_are_aborted_again_and_a_load_waits_for_them(server_with: Make) -> None:
    """One whose images are being read, say, comes to SGLang's scheduler behind the abort."""

    async def story() -> None:
        manager, _, call, load = await loading_with_a_request_inside(server_with)
        await asyncio.sleep(2.5 * AGAIN_SECONDS)
        assert manager.aborted == 3 and manager.asked == []
        manager.answers.set()
        await asyncio.gather(call, load)
        assert manager.asked == ["flush", "load load"]

    asyncio.run(story())


def test_a_load_that_was_given_up_while_requests_ended_is_not_asked_for(server_with: Make) -> None:
    async def story() -> None:
        manager, server, call, load = await loading_with_a_request_inside(server_with)
        await asyncio.sleep(0.01)
        await server.abandon_sync("another rank failed")
        manager.answers.set()
        with pytest.raises(RuntimeError, match="gave this sync up"):
            await load
        await call
        assert manager.asked == ["flush"]

    asyncio.run(story())


def test_requests_that_come_to_a_paused_colocated_engine_wait_before_its_gate(server_with: Make) -> None:
    """In SGLang they would be past it, when the engine is put to sleep."""

    async def story() -> None:
        manager = Manager()
        manager.answers.set()
        server = server_with(manager, "abort", RolloutMode.HYBRID, "naive")
        await server.abort_all_requests()
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await server.sleep()
        await server.resume_generation()
        await asyncio.sleep(0.05)
        assert manager.keys == [] and not call.done(), "it sleeps"
        await server.resume_tags(["weights"])
        await loaded(server, 7)
        assert not call.done(), "its KV cache is released"
        await server.load_weights(("sync",), "8")
        await server.finish_sync(["kv_cache"])
        assert (await call).extra_fields["global_steps"] == 8

    asyncio.run(story())
