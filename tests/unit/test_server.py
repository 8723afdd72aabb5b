# SPDX-License-Identifier: Apache-2.0
"""The server actor's order of requests to SGLang, with a tokenizer manager that only notes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from sglang.srt.utils import MultiprocessingSerializer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS
from verl_sync_plugin.rollouts.sglang.complaints import answer
from verl_sync_plugin.rollouts.sglang.endpoint import ServerActorEndpoint
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK, TOKEN_VARIABLE, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer


class Manager:
    """Answers in the order of its requests, as a scheduler does; the load ends when it is told to."""

    server_args = SimpleNamespace(tp_size=1, weight_version="")

    def __init__(self, flushes: bool = True) -> None:
        self.asked: list[str] = []
        self.fed = asyncio.Event()
        self.hangs = 0  # so many of the next requests about memory get no answer before `goes_on`
        self.goes_on = asyncio.Event()
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
        await self._answer(f"resume {','.join(obj.tags)}")

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        await self._answer(f"release {','.join(obj.tags)}")

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        raise AssertionError("nobody asks for a response")
        yield

    async def _answer(self, asked: str) -> None:
        self.asked.append(asked)
        self.hangs -= 1
        if self.hangs >= 0:
            await self.goes_on.wait()


Make = Callable[..., Any]


@pytest.fixture
def server_with(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang; inside a
    loop, for that is where its locks belong."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())

    def make(manager: Manager, released: tuple[str, ...] = (), timeout_seconds: float = 60.0) -> Any:
        sync = {"timeout_seconds": timeout_seconds}
        config = RolloutConfig(name="sglang", custom={"sync": sync}, max_model_len=64)
        model = HFModelConfig(path=tiny_model("qwen2"))
        server = SyncSGLangHttpServer(config, model, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
        server.tokenizer_manager = manager
        server.guard_requests()
        server.occupation.state.note_released(released)
        return server

    return make


async def loaded(server: Any, manager: Manager) -> None:
    """A load during which the trainer says that a flush may be asked for."""
    load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
    await asyncio.sleep(0)
    await server.flush_behind_load()
    await asyncio.sleep(0)
    manager.fed.set()
    await load


def test_an_awake_engine_flushes_behind_the_load_and_once(server_with: Make) -> None:
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


def test_an_engine_without_its_cache_flushes_when_it_is_back(server_with: Make) -> None:
    async def sync() -> None:
        manager = Manager()
        server = server_with(manager, (KV_CACHE,))
        await loaded(server, manager)
        await server.finish_sync([KV_CACHE])
        assert manager.asked == ["load", f"resume {KV_CACHE}", "flush"]

    asyncio.run(sync())


@pytest.mark.parametrize("released", [(), (WEIGHTS, KV_CACHE)])
def test_a_flush_that_fails_keeps_the_engine_from_generating(released: tuple[str, ...], server_with: Make) -> None:
    async def sync() -> None:
        manager = Manager(flushes=False)
        server = server_with(manager, released)
        await loaded(server, manager)
        with pytest.raises(RuntimeError, match="could not flush its cache"):
            await server.finish_sync(list(released))
        with pytest.raises(RuntimeError, match="waking up after the sync failed"):
            await server.generate([1], {}, "request")

    asyncio.run(sync())


def test_a_flush_behind_a_failed_load_is_not_taken_for_the_next_one(server_with: Make) -> None:
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


BOUND = 0.3
BOTH = f"{KV_CACHE},{WEIGHTS}"


async def times_out(call: Any, what: str) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"SGLang did not {what} .*{KEY_PREFIX}\.timeout_seconds=0\.3"):
        await call
    assert BOUND * 0.9 < time.monotonic() - before < BOUND + 2  # an event loop's timer may end a little early


def test_a_sleep_without_an_answer_ends_in_an_error_that_names_the_key(server_with: Make) -> None:
    async def sleep() -> None:
        manager = Manager()
        server = server_with(manager, timeout_seconds=BOUND)
        manager.hangs = 1
        await times_out(server.sleep(), "release kv_cache, weights")
        await times_out(server.resume_tags([WEIGHTS]), "resume weights")
        await times_out(server.sleep(), "release kv_cache, weights")
        assert manager.asked == [f"release {BOTH}"], "an engine that hangs is asked for nothing more"

    asyncio.run(sleep())


def test_what_was_released_late_is_known_to_be_released(server_with: Make) -> None:
    """A second pause would end SGLang's process, and a resume without release its scheduler."""

    async def sleep() -> None:
        manager = Manager()
        server = server_with(manager, timeout_seconds=BOUND)
        manager.hangs = 1
        await times_out(server.sleep(), "release")
        manager.goes_on.set()
        await server.sleep()
        await server.resume_tags([WEIGHTS])
        await server.resume_tags([WEIGHTS])
        await server.sleep()
        assert manager.asked == [f"release {BOTH}", f"resume {WEIGHTS}", f"release {WEIGHTS}"]

    asyncio.run(sleep())


def test_what_was_asked_late_and_failed_is_asked_again(server_with: Make) -> None:
    async def wake() -> None:
        manager = Manager()
        server = server_with(manager, (KV_CACHE, WEIGHTS), BOUND)
        manager.hangs, wait = 1, manager.goes_on.wait

        async def failing() -> None:
            await wait()
            raise RuntimeError("injected: SGLang refused")

        manager.goes_on.wait = failing  # type: ignore[method-assign, assignment]
        await times_out(server.resume_tags([WEIGHTS]), "resume weights")
        manager.goes_on.set()
        await server.resume_tags([WEIGHTS])
        assert manager.asked == [f"resume {WEIGHTS}"] * 2
        assert server.occupation.state.released == {KV_CACHE}

    asyncio.run(wake())


def test_who_has_waited_in_vain_is_not_served_later(server_with: Make) -> None:
    async def wake() -> None:
        manager = Manager()
        server = server_with(manager, (KV_CACHE, WEIGHTS), BOUND)
        manager.hangs = 1
        calls = [server.resume_tags([WEIGHTS]), server.resume_tags([KV_CACHE]), server.sleep()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 3
        manager.goes_on.set()
        await asyncio.sleep(BOUND)
        assert manager.asked == [f"resume {WEIGHTS}"] and server.occupation.state.released == {KV_CACHE}

    asyncio.run(wake())


class AdapterManager(Manager):
    """Notes what becomes of an adapter; its engine rank answers what it is told to of it, or nothing."""

    def __init__(self, *answers: str | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.names: dict[str, str] = {}
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: self.names)

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        ((question, adapter, sent, _), _), *_ = MultiprocessingSerializer.deserialize(obj.serialized_named_tensors[0])
        self.asked.append(f"look at {adapter or 'names'} {[name for name, *_ in sent]}")
        assert obj.load_format == ADAPTER_CHECK
        said = self.answers.pop(0)
        if said is not None:
            answer(question, said)
        return True, ""

    async def unload_lora_adapter(self, obj: Any) -> Any:
        self.asked.append("unload")
        return SimpleNamespace(success=True)

    async def load_lora_adapter_from_tensors(self, obj: Any) -> Any:
        self.asked.append("adapter")
        self.names[obj.lora_name] = ""
        return SimpleNamespace(success=True)


def test_an_adapter_is_looked_at_before_it_is_loaded_first_and_behind_every_load(server_with: Make) -> None:
    async def syncs() -> None:
        manager = AdapterManager("", "", "", "", "SGLang has no place for these", None)
        server = server_with(manager)
        factors = [("q.lora_A.weight", 4, 1)]
        await server.load_adapter({}, b"", factors, "7")
        looks = [f"look at {name} ['q.lora_A.weight']" for name in ("names", SGLANG_LORA_NAME)]
        assert manager.asked == [looks[0], "adapter", looks[1]]
        await server.load_adapter({}, b"", factors, "8")
        assert manager.asked[3:] == ["unload", "adapter", looks[1]]
        manager.answers.pop(0)
        with pytest.raises(ValueError, match="SGLang has no place for these"):
            await server.load_adapter({}, b"", factors, "9")
        await server.abandon_sync("a rank failed")
        with pytest.raises(RuntimeError, match="did not tell what it holds of the adapter"):
            await server.load_adapter({}, b"", factors, "10")

    asyncio.run(syncs())
