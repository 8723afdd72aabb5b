"""The server actor's order of requests to SGLang, with a tokenizer manager that only notes them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl_sync_plugin.hooks.awake import KV_CACHE, WEIGHTS, AwakeState
from verl_sync_plugin.hooks.endpoint import ServerActorEndpoint
from verl_sync_plugin.hooks.gate import WeightsGate
from verl_sync_plugin.hooks.server import SyncSGLangHttpServer


class Manager:
    """Answers in the order of its requests, as a scheduler does; the load ends when it is told to."""

    server_args = SimpleNamespace(tp_size=1, weight_version="")

    def __init__(self, flushes: bool = True) -> None:
        self.asked: list[str] = []
        self.fed = asyncio.Event()
        self._flushes = flushes
        self._busy = asyncio.Lock()

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        self.asked.append("load")
        assert not obj.flush_cache, "SGLang ends its scheduler when it cannot flush there"
        async with self._busy:
            await self.fed.wait()
        return True, ""

    async def flush_cache(self) -> Any:
        self.asked.append("flush")
        async with self._busy:
            return SimpleNamespace(success=self._flushes)

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        self.asked.append(f"resume {','.join(obj.tags)}")


def server_with(manager: Manager, released: tuple[str, ...] = ()) -> Any:
    server = object.__new__(SyncSGLangHttpServer)
    server.tokenizer_manager, server._awake, server._gate = manager, AwakeState(), WeightsGate()
    server._memory_lock, server._sleep_seconds, server._flushing = asyncio.Lock(), 0.0, None
    server._awake.note_released(released)
    return server


async def loaded(server: Any, manager: Manager) -> None:
    """A load during which the trainer says that a flush may be asked for."""
    load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
    await asyncio.sleep(0)
    await server.flush_behind_load()
    await asyncio.sleep(0)
    manager.fed.set()
    await load


def test_an_awake_engine_flushes_behind_the_load_and_once() -> None:
    async def sync() -> None:
        manager = Manager()
        server = server_with(manager)
        for number in (1, 2):
            await loaded(server, manager)
            assert manager.asked == ["load", "flush"] * number, "asked for while the load was under way"
            await server.finish_sync([])
            assert manager.asked == ["load", "flush"] * number
        assert server.global_steps == 7

    asyncio.run(sync())


def test_an_engine_without_its_cache_flushes_when_it_is_back() -> None:
    async def sync() -> None:
        manager = Manager()
        server = server_with(manager, (KV_CACHE,))
        await loaded(server, manager)
        await server.finish_sync([KV_CACHE])
        assert manager.asked == ["load", f"resume {KV_CACHE}", "flush"]

    asyncio.run(sync())


@pytest.mark.parametrize("released", [(), (WEIGHTS, KV_CACHE)])
def test_a_flush_that_fails_keeps_the_engine_from_generating(released: tuple[str, ...]) -> None:
    async def sync() -> None:
        manager = Manager(flushes=False)
        server = server_with(manager, released)
        await loaded(server, manager)
        with pytest.raises(RuntimeError, match="could not flush its cache"):
            await server.finish_sync(list(released))
        with pytest.raises(RuntimeError, match="waking up after the sync failed"):
            await server._gate.enter()

    asyncio.run(sync())


def test_a_flush_behind_a_failed_load_is_not_taken_for_the_next_one() -> None:
    async def syncs() -> None:
        manager = Manager()
        server = server_with(manager)
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
    mesh: Any = None
    ServerActorEndpoint(server, mesh, True, 1.0, awake).flush_behind_load()
    assert len(told) == awake
