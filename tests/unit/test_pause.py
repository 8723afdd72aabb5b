# SPDX-License-Identifier: Apache-2.0
"""What the server actor asks SGLang for around a sync in each pause mode, with a tokenizer manager that only notes it.

What SGLang does then: ``tests/contract/test_pause_modes.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from noting_manager import Manager
from sglang.srt.managers.io_struct import GenerateReqInput
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_sync_plugin.config.settings import SEPARATE_BACKEND
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER, LOADER, TOKEN_VARIABLE, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer

STANDALONE, HYBRID = RolloutMode.STANDALONE, RolloutMode.HYBRID
Make = Callable[..., Any]


@pytest.fixture
def server_with(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())

    def make(
        manager: Manager,
        pause: str,
        mode: RolloutMode = STANDALONE,
        backend: str = SEPARATE_BACKEND,
        node_rank: int = 0,
    ) -> Any:
        engine = CheckpointEngineConfig(backend=backend)
        config = RolloutConfig(
            name="sglang", custom={"sync": {"pause": pause}}, checkpoint_engine=engine, max_model_len=64
        )
        model = HFModelConfig(path=tiny_model("qwen2"))
        server = SyncSGLangHttpServer(config, model, mode, [], 0, node_rank, 1, "", 0)
        server.tokenizer_manager = manager
        return server

    return make


async def synced(server: Any, version: int = 7) -> None:
    """verl's calls around a sync of a separate rollout, and ours in it."""
    await server.abort_all_requests()
    await server.release_kv_cache()
    await loaded(server, version)
    await server.resume_kv_cache()
    await server.resume_generation()


async def loaded(server: Any, version: int) -> None:
    await server.load_weights(("sync",), str(version))
    await server.flush_behind_load()
    await server.finish_sync([])


ABORTING = ["pause abort", "release kv_cache", "load load", "resume kv_cache", "flush", "continue"]


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
            getattr(server, load)(*{"load_weights": (("s",), "7")}.get(load, ({}, b"", "7")))
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


def test_nothing_goes_on_without_the_memory_that_a_driver_has_released(server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort")
        await server.sleep()
        assert manager.asked == ["release kv_cache"], "no sync resumes the weights of a separate rollout"
        await loaded(server, 7)
        assert manager.asked[1:] == ["pause abort", "load load", "resume kv_cache", "flush", "continue"]

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


def test_servers_of_other_hosts_ask_for_nothing(server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "retract", node_rank=1)
        await server.abort_all_requests()
        await server.resume_generation()
        assert manager.asked == []

    asyncio.run(story())


@pytest.mark.parametrize(("pause", "versions"), [("abort", None), ("retract", (6, 7)), ("in_place", (6, 7))])
def test_a_call_that_spans_a_sync_names_both_versions(
    pause: str, versions: tuple[int, int] | None, server_with: Make
) -> None:
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
        found = fields.get("min_global_steps"), fields.get("max_global_steps")
        assert found == (versions or (None, None)), "verl's client fills in what is not there"

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
