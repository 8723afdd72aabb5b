# SPDX-License-Identifier: Apache-2.0
"""The server actor's order of requests to SGLang, with a tokenizer manager that only notes them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ordered_manager import Make, Manager
from ray.exceptions import ActorDiedError

from verl_sync_plugin import compat
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.sglang.endpoint import ServerActorEndpoint


async def loaded(server: Any, manager: Manager) -> None:
    """A load during which the trainer says that a flush may be asked for."""
    load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
    await asyncio.sleep(0)
    await server.flush_behind_load()
    await asyncio.sleep(0)
    manager.fed.set()
    await load


def test_an_awake_engine_flushes_behind_the_load_and_once(hybrid_server: Make) -> None:
    async def sync() -> None:
        manager = Manager()
        server = hybrid_server(manager)
        for number in (1, 2):
            await loaded(server, manager)
            assert manager.asked == ["load", "flush"] * number, "asked for while the load was under way"
            await server.finish_sync([])
            assert manager.asked == ["load", "flush"] * number
        assert server.global_steps == 7

    asyncio.run(sync())


def test_an_engine_without_its_cache_flushes_when_it_is_back(hybrid_server: Make) -> None:
    async def sync() -> None:
        manager = Manager()
        server = hybrid_server(manager, (KV_CACHE,))
        await loaded(server, manager)
        await server.finish_sync([KV_CACHE])
        assert manager.asked == ["load", f"resume {KV_CACHE}", "flush"]

    asyncio.run(sync())


@pytest.mark.parametrize("loads", [True, False])
def test_the_end_of_a_sync_waits_for_its_load_and_fails_with_it(loads: bool, hybrid_server: Make) -> None:
    """Who syncs separate rollouts asks for the end as soon as the sync is proven, maybe before SGLang has answered."""

    async def sync() -> None:
        manager = Manager(loads=loads)
        server = hybrid_server(manager)
        load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
        await asyncio.sleep(0)
        end = asyncio.ensure_future(server.finish_sync([]))
        await asyncio.sleep(0.1)
        assert not end.done() and server.global_steps is None and manager.asked == ["load"]
        manager.fed.set()
        ends = await asyncio.gather(load, end, return_exceptions=True)
        assert manager.asked == ["load", "flush"][: 1 + loads] and server.global_steps == (7 if loads else None)
        assert [str(each) for each in ends if each] == ["SGLang refused the weight update: injected"] * 2 * (not loads)
        if not loads:
            with pytest.raises(RuntimeError, match="ending the sync failed: SGLang refused the weight update"):
                await server.generate([1], {}, "request")

    asyncio.run(sync())


def test_a_load_that_failed_in_an_earlier_sync_does_not_fail_the_next_adapter(
    hybrid_server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[str] = []

    async def replace(manager: Manager, name: str, *args: Any) -> None:
        replaced.append(name)

    monkeypatch.setattr(compat, "replace_adapter", replace)

    async def syncs() -> None:
        manager = Manager(loads=False)
        manager.fed.set()
        server = hybrid_server(manager)
        with pytest.raises(RuntimeError, match="injected"):
            await server.load_weights(("sync",), "7")
        with pytest.raises(RuntimeError, match="injected"):
            await server.load_adapter({}, b"", "7")
        await server.abandon_sync("its load failed")
        await server.load_adapter({}, b"", "8")
        await server.finish_sync([])
        assert len(replaced) == 1 and server.global_steps == 8

    asyncio.run(syncs())


@pytest.mark.parametrize("released", [(), (WEIGHTS, KV_CACHE)])
def test_a_flush_that_fails_keeps_the_engine_from_generating(released: tuple[str, ...], hybrid_server: Make) -> None:
    async def sync() -> None:
        manager = Manager(flushes=False)
        server = hybrid_server(manager, released)
        await loaded(server, manager)
        with pytest.raises(RuntimeError, match="could not flush its cache"):
            await server.finish_sync(list(released))
        with pytest.raises(RuntimeError, match="ending the sync failed"):
            await server.generate([1], {}, "request")

    asyncio.run(sync())


def test_a_flush_behind_a_failed_load_is_not_taken_for_the_next_one(hybrid_server: Make) -> None:
    async def syncs() -> None:
        manager = Manager()
        server = hybrid_server(manager)
        await loaded(server, manager)
        await server.abandon_sync("another rank failed")
        await server.load_weights(("sync",), "8")
        await server.finish_sync([])
        assert manager.asked == ["load", "flush", "load", "flush"]

    asyncio.run(syncs())


@pytest.mark.parametrize("awake", [True, False])
def test_only_an_engine_that_is_awake_behind_the_load_is_told_to_flush(awake: bool) -> None:
    told: list[None] = []
    server = SimpleNamespace(flush_behind_load=SimpleNamespace(remote=lambda: told.append(None)))
    ServerActorEndpoint(server, 0, (0,), True, 1.0, awake).flush_behind_load()
    assert len(told) == awake


def test_a_server_that_died_is_named_with_what_to_do_then() -> None:
    died: Future[Any] = Future()
    died.set_exception(ActorDiedError())
    reference = SimpleNamespace(future=lambda: died)
    server = SimpleNamespace(resume_tags=SimpleNamespace(remote=lambda tags: reference))
    leader = ServerActorEndpoint(server, 0, (0,), True, 1.0, False, after_death="restart the run")
    with pytest.raises(RuntimeError, match=r"the rollout server died, and its engine with it \(.*\); restart the run"):
        asyncio.run(leader.resume([WEIGHTS]))
