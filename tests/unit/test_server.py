# SPDX-License-Identifier: Apache-2.0
"""The server actor between verl and a tokenizer manager that notes what it is asked for: the order of a sync, what a
failure leaves, and what requests learn. What SGLang does then: ``tests/contract/test_pause_modes.py``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from noting_manager import Manager, loaded, synced
from ray.exceptions import ActorDiedError
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils import MultiprocessingSerializer
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.adapter import calls_of
from verl_sync_plugin.rollouts.gate import KV_CACHE
from verl_sync_plugin.rollouts.sglang import server as module
from verl_sync_plugin.rollouts.sglang.request import ADAPTER_CHECK
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

HYBRID = RolloutMode.HYBRID
Make = Callable[..., Any]


def ask(server: Any) -> Any:
    """A request of verl's under way."""
    return asyncio.ensure_future(server.generate([1], {"max_new_tokens": 1}, "request"))


def test_the_cache_is_flushed_once_and_a_flush_that_fails_locks_the_gate(server_with: Make) -> None:
    """During the load where the engine is awake; nobody takes the flush of a load that failed for the next one's."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort", HYBRID, "naive")
        await loaded(server, 7)
        assert manager.asked == ["load load", "flush"] and server.global_steps == 7
        await server.load_weights(("sync",), "8")
        await server.flush_behind_load()
        await asyncio.sleep(0)
        await server.abandon_sync("another rank failed")
        await server.load_weights(("sync",), "8")
        await server.finish_sync([])
        assert manager.asked[2:] == ["load load", "flush", "load load", "flush"]
        manager.flushes = False
        with pytest.raises(RuntimeError, match="could not flush its cache"):
            await loaded(server, 9)
        with pytest.raises(RuntimeError, match="waking up after the sync failed"):
            await server.generate([1], {}, "request")

    asyncio.run(story())


def test_servers_of_other_hosts_ask_for_nothing(server_with: Make) -> None:
    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "retract", node_rank=1)
        await server.abort_all_requests()
        await server.resume_generation()
        assert manager.asked == []

    asyncio.run(story())


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


def test_a_server_that_died_is_named_with_what_to_do_then() -> None:
    died: Future[Any] = Future()
    died.set_exception(ActorDiedError())
    reference = SimpleNamespace(future=lambda: died)
    server = SimpleNamespace(resume_tags=SimpleNamespace(remote=lambda tags: reference))
    leader = RolloutEndpoint(rollout_of("sglang"), calls_of(server, "restart the run"), (0,), True, 1.0)
    with pytest.raises(RuntimeError, match=r"the rollout server died, and its engine with it \(.*\); restart the run"):
        asyncio.run(leader.resume(["weights"]))


class AdapterManager(Manager):
    """Notes what becomes of an adapter; its engine rank answers what it is told to of it, or nothing."""

    def __init__(self, *answers: str | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.names: dict[str, str] = {}
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: self.names)

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        ((folder, adapter, sent, _), _), *_ = MultiprocessingSerializer.deserialize(obj.serialized_named_tensors[0])
        self.asked.append(f"look at {adapter or 'names'} {[name for name, *_ in sent]}")
        assert obj.load_format == ADAPTER_CHECK
        said = self.answers.pop(0)
        if said is not None:
            Path(folder, "0").write_text(json.dumps(said))
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
        server = server_with(manager, "abort", HYBRID, "naive")
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
        with pytest.raises(RuntimeError, match="did not answer what it holds of the adapter"):
            await server.load_adapter({}, b"", factors, "10")

    asyncio.run(syncs())


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
        call = ask(server)
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


def test_a_sync_that_nobody_ends_is_waited_for_with_a_bound(server_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "together_seconds", lambda seconds: 0.01)

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


def test_requests_that_outlive_an_abort_are_aborted_again_and_a_load_waits_for_them(server_with: Make) -> None:
    """One whose images are being read, say, comes to SGLang's scheduler behind the abort."""

    async def story() -> None:
        manager = Manager()
        server = server_with(manager, "abort", HYBRID, "naive")
        call = ask(server)
        await asyncio.sleep(0)
        load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
        await asyncio.sleep(2.5 * module.AGAIN_SECONDS)
        assert manager.aborted == 3 and manager.asked == []
        manager.answers.set()
        await asyncio.gather(call, load)
        assert manager.asked == ["flush", "load load"]

    asyncio.run(story())
