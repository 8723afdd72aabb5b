# SPDX-License-Identifier: Apache-2.0
"""What the server actor asks SGLang for around a sync in each pause mode, with a tokenizer manager that only notes it.

What SGLang does then: ``tests/contract/test_pause_modes.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from noting_manager import ABORTING, Manager, loaded, synced
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_sync_plugin.config.settings import SEPARATE_BACKEND
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER, LOADER

HYBRID = RolloutMode.HYBRID
Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("pause", "asked"),
    [
        ("abort", ABORTING),
        ("retract", ["pause retract", "load load_and_forget_prefixes", "continue"]),
        ("in_place", ["pause in_place", "load load", "continue"]),
    ],
)
def test_the_cache_goes_only_when_no_request_stays(pause: str, asked: list[str], server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        await synced(server_with(manager, pause))
        assert manager.asked == asked

    asyncio.run(story())


@pytest.mark.parametrize(
    ("pause", "asked"),
    [
        ("abort", ["pause abort", "load load", "flush", "continue"]),
        ("retract", ["pause retract", "load load_and_forget_prefixes", "continue"]),
        ("in_place", ["pause in_place", "load load", "continue"]),
    ],
)
def test_a_load_pauses_a_server_whose_driver_has_not(pause: str, asked: list[str], server_with: Make) -> None:
    """And leaves it paused where the sync fails, until one succeeds."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause)
        for version in (7, 8):
            await loaded(server, version)
        assert manager.asked == [*asked, *asked]
        await server.load_weights(("sync",), "9")
        await server.abandon_sync("a trainer rank failed")
        with pytest.raises(RuntimeError, match="half written"):
            await server.resume_generation()
        manager.asked.clear()
        await loaded(server, 10)
        assert manager.asked == [each for each in asked if not each.startswith("pause")]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("mode", "backend", "load_format", "waits"),
    [
        (RolloutMode.STANDALONE, SEPARATE_BACKEND, "auto", True),
        (RolloutMode.STANDALONE, "nccl", "auto", False),
        (HYBRID, "naive", "dummy", True),
        (HYBRID, "naive", "auto", True),
    ],
)
def test_a_replica_answers_behind_its_first_sync(
    mode: RolloutMode, backend: str, load_format: str, waits: bool, server_with: Make
) -> None:
    """It holds the weights that it was launched with, which may be made up; who needs no sync of ours answers at
    once."""

    async def story() -> None:
        manager = Manager()
        manager.answers.set()
        server = server_with(manager, "abort", mode, backend, had_a_sync=False, load_format=load_format)
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await asyncio.sleep(0.05)
        assert call.done() != waits
        if waits:
            await loaded(server, 7)
            assert (await call).extra_fields["global_steps"] == 7

    asyncio.run(story())


def test_a_pause_waits_in_short_turns_for_requests_that_end(server_with: Make) -> None:
    """SGLang's own looks once a second."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort")
        call = asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))
        await asyncio.sleep(0)
        pausing = asyncio.ensure_future(server.abort_all_requests())
        await asyncio.sleep(0.01)
        assert manager.aborted == 1 and manager.asked == []
        manager.answers.set()
        await asyncio.sleep(0.1)
        assert pausing.done() and manager.asked == ["pause abort"] and call.done()

    asyncio.run(story())


def test_nothing_goes_on_without_the_memory_that_a_driver_has_released(server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort")
        await server.sleep()
        assert manager.asked == ["release kv_cache"], "no sync resumes the weights of a separate rollout"
        await loaded(server, 7)
        assert manager.asked[1:] == ["pause abort", "load load", "resume kv_cache", "flush", "continue"]

    asyncio.run(story())


@pytest.mark.parametrize("pause", ["retract", "in_place"])
@pytest.mark.parametrize(
    ("mode", "backend"), [(HYBRID, SEPARATE_BACKEND), (HYBRID, "naive"), (RolloutMode.STANDALONE, "nccl")]
)
def test_others_than_separate_rollouts_of_ours_abort(
    pause: str, mode: RolloutMode, backend: str, server_with: Make
) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, pause, mode, backend)
        await synced(server)
        assert manager.asked == ABORTING
        assert manager.aborted == (mode == HYBRID), "what verl syncs is left as it is"
        await server.abandon_sync("another rank failed")
        await server.resume_generation()  # as verl's

    asyncio.run(story())


def test_servers_of_other_hosts_ask_for_nothing(server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "retract", node_rank=1)
        await server.abort_all_requests()
        await server.resume_generation()
        assert manager.asked == []

    asyncio.run(story())


@pytest.mark.parametrize(("pause", "loader"), [("abort", LOADER), ("retract", FORGETTING_LOADER), ("in_place", LOADER)])
def test_sglang_is_launched_with_the_loader_that_is_asked_for(
    pause: str, loader: str, server_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    async def launched(self: Any, **_: Any) -> None:
        given.append(self.config.engine_kwargs["sglang"]["custom_weight_loader"])

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launched)
    asyncio.run(server_with(Manager(), pause).launch_server())
    assert given == [[loader]]


def test_arguments_of_a_newer_verl_reach_its_own_methods(server_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    async def newer(server: Any, **more: Any) -> None:
        given.update(more)

    monkeypatch.setattr(SGLangHttpServer, "abort_all_requests", newer)
    monkeypatch.setattr(SGLangHttpServer, "resume_generation", newer)

    async def story() -> None:
        server = server_with(Manager(), "abort", HYBRID, "naive")
        await server.abort_all_requests(reject_request=True)
        await server.resume_generation(soon=True)

    asyncio.run(story())
    assert given == {"reject_request": True, "soon": True}


def test_arguments_that_nothing_uses_are_named(server_with: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that ask for nothing are not."""

    async def story() -> None:
        server = server_with(Manager(), "retract")
        await server.sleep(reset_connector=True, level=None)
        await server.abort_all_requests(reject_request=False)

    asyncio.run(story())
    assert "sleep does not use what this verl gives it: reset_connector=True\n" in capsys.readouterr().out


class Counting(Manager):
    """Of SGLang 0.5.19 or later: ``server_args`` stay as they were at the launch, and the schedulers count versions."""

    def __init__(self) -> None:
        super().__init__()
        self.server_args = SimpleNamespace(tp_size=1, weight_version="default", enable_weights_cpu_backup=False)
        self._version, self._counted = "default", "default"

    def config_value(self, name: str) -> Any:
        return self._version if name == "weight_version" else getattr(self.server_args, name)

    async def update_weight_version(self, obj: Any) -> None:
        assert not obj.abort_all_requests
        self.asked.append("version")
        self._counted = self._version = obj.new_version

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        spans = [{"version": self._counted, "start": 0, "end": 1}]
        yield {"meta_info": {"weight_version": self._version}}
        yield {"meta_info": {"weight_version": self._version, "weight_versions": spans}}


class Later(Counting):
    """Of SGLang 0.5.17 or 0.5.18, which counts nothing."""

    update_weight_version = property()  # type: ignore[assignment]

    def _update_weight_version_if_provided(self, version: str) -> None:
        self._version = version


@pytest.mark.parametrize(
    ("kind", "versions"),
    [(Counting, [None, [{"version": "7", "start": 0, "end": 1}]]), (Later, [["7"], ["7"]])],
)
def test_answers_bear_the_version_of_their_weights(
    kind: type[Counting], versions: list[Any], server_with: Make
) -> None:
    """SGLang's own where its schedulers count, for which they are told before generation goes on; else what it reports
    now, not what it was launched with."""

    async def story() -> None:
        manager = kind()
        server = server_with(manager, "retract")
        await synced(server)
        assert ("version" in manager.asked) == (kind is Counting) and manager.asked[-1] == "continue"
        asked = SimpleNamespace(extra_key=None)
        metas = [answer["meta_info"] async for answer in manager.generate_request(asked)]
        assert [meta.get("weight_versions") for meta in metas] == versions
        assert {meta["weight_version"] for meta in metas} == {"7"}

    asyncio.run(story())
