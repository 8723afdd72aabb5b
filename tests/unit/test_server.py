# SPDX-License-Identifier: Apache-2.0
"""The server actor between verl and a tokenizer manager that notes what it is asked for: the order of a sync, what a
failure leaves, and what requests learn. What SGLang does then: ``tests/contract/test_pause_modes.py``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import pytest
import sglang
import torch.distributed as dist
from ray.exceptions import ActorDiedError
from sglang.srt import server_args
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from contract.sglang_models import config_of
from verl_sync_plugin import compat
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, TURN_OFF
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.adapter import calls_of
from verl_sync_plugin.rollouts.gate import KV_CACHE
from verl_sync_plugin.rollouts.sglang import server as module
from verl_sync_plugin.rollouts.sglang.request import TOKEN_VARIABLE, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.script_server import ScriptServer
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

HYBRID = RolloutMode.HYBRID
Make = Callable[..., Any]


class Manager:
    """Notes what it is asked for; a request is answered when it is told to."""

    server_args = SimpleNamespace(tp_size=1, weight_version="", enable_weights_cpu_backup=False)

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: list[Any] = []
        self.answers = asyncio.Event()
        self.closed = self.aborted = 0
        self.flushes = True
        self.model_update_lock = SimpleNamespace(is_locked=self._locked)

    async def _locked(self) -> bool:
        return self.closed < len(self.keys)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted += 1

    async def pause_generation(self, obj: Any) -> None:
        self.asked.append(f"pause {obj.mode}")

    async def continue_generation(self, obj: Any) -> None:
        self.asked.append("continue")

    async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
        self.asked.append(f"load {obj.load_format.rpartition('.')[2]}")
        return True, ""

    async def flush_cache(self) -> Any:
        self.asked.append("flush")
        return SimpleNamespace(success=self.flushes)

    async def release_memory_occupation(self, obj: Any, request: None) -> None:
        self.asked.append(f"release {' '.join(obj.tags)}")

    async def resume_memory_occupation(self, obj: Any, request: None) -> None:
        self.asked.append(f"resume {' '.join(obj.tags)}")

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        self.keys.append(obj.extra_key)
        try:
            await self.answers.wait()
            yield {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}
        finally:
            self.closed += 1


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


@pytest.fixture
def server_with(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())

    def make(
        manager: Manager,
        pause: str,
        mode: RolloutMode = RolloutMode.STANDALONE,
        backend: str = SEPARATE_BACKEND,
        node_rank: int = 0,
        had_a_sync: bool = True,
        load_format: str = "dummy",
    ) -> Any:
        engine = CheckpointEngineConfig(backend=backend)
        config = RolloutConfig(
            name="sglang",
            custom={"sync": {"pause": pause}},
            checkpoint_engine=engine,
            load_format=load_format,
            max_model_len=64,
        )
        model = HFModelConfig(path=tiny_model("qwen2"))
        server = SyncSGLangHttpServer(config, model, mode, [], 0, node_rank, 1, "", 0)
        server.tokenizer_manager = manager
        server.guard_requests()
        if had_a_sync:
            server._gate.succeed(server._gate.begin())
        return server

    return make


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


# Draft models of speculative decoding: a sync writes the target alone, and a draft outlives the engine's sleep


@pytest.fixture
def group() -> Iterator[Any]:
    """The group of an engine's ranks, of which there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Updated:
    """A worker of SGLang's that notes whether it is to load."""

    def __init__(self) -> None:
        self.loads = 0

    def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        self.loads += 1
        return True, ""


def test_sglang_loads_into_the_target_and_not_into_the_draft(server_with: Make, group: Any) -> None:
    target, draft = Updated(), Updated()
    scheduler: Any = SimpleNamespace(
        tp_worker=target, draft_worker=draft, tp_cpu_group=group, flush_cache_after_weight_update=lambda request: None
    )

    class Engine(Manager):
        async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
            answer = SchedulerUpdateWeightsMixin.update_weights_from_tensor(scheduler, obj)
            return answer.success, answer.message

    asyncio.run(server_with(Engine(), "abort").load_weights(("sync",), "1"))
    assert (target.loads, draft.loads) == (1, 0)


def test_releases_that_select_models_are_asked_for_the_target() -> None:
    class Request:
        __struct_fields__ = ("serialized_named_tensors", "load_format", "selector")

    assert compat.target_alone(Request) == {"selector": "target"}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/a/draft"}, (True, "auto")),
        ({"speculative_algorithm": "NGRAM"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_a_draft_is_loaded_from_its_checkpoint_and_kept_while_the_engine_sleeps(
    arguments: dict[str, str], kept: tuple[Any, Any], server_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's default loads random weights, which the first sync replaces in the target; nobody sends the draft's."""
    given: list[Any] = []

    async def launched(self: Any, **_: Any) -> None:
        given.append(dict(self.config.engine_kwargs["sglang"]))

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launched)
    server = server_with(Manager(), "abort", RolloutMode.HYBRID, "naive")
    server.config.engine_kwargs["sglang"] = dict(arguments)
    asyncio.run(server.launch_server())
    (launch,) = given
    found = launch.get("enable_draft_weights_cpu_backup"), launch.get("speculative_draft_load_format")
    assert found == kept


# What SGLang made of its arguments is judged as the given ones are


SAID = r"\.moe_runner_backend='flashinfer_trtllm' \(as SGLang resolved it at its launch\): .* set \S+=triton"


@pytest.fixture
def on_blackwell(tmp_path: Path) -> Callable[..., Any]:
    """SGLang's own arguments for a mixture of experts, resolved as on a Blackwell GPU."""
    model = {**config_of("qwen3-moe"), "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))

    def resolved(**given: Any) -> Any:
        with mock.patch.object(server_args, "is_sm100_supported", lambda: True):
            return server_args.ServerArgs(
                model_path=str(tmp_path), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
                disable_cuda_graph=True, **given,
            )  # fmt: skip

    return resolved


def launched(resolved: Any, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches our server, with verl's launch replaced by what it leaves behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def launch(self: Any, **_: Any) -> None:
        self.tokenizer_manager = SimpleNamespace(server_args=resolved, generate_request=None)

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch)
    config = RolloutConfig(name="sglang", max_model_len=64)
    server = SyncSGLangHttpServer(
        config, HFModelConfig(path=tiny_model("qwen2")), RolloutMode.HYBRID, [], 0, 0, 1, "", 0
    )
    asyncio.run(server.launch_server())


def test_experts_that_blackwell_reorders_are_refused_behind_the_launch(
    on_blackwell: Callable[..., Any], tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang" + SAID) as caught:
        launched(on_blackwell(), tiny_model, monkeypatch)
    assert TURN_OFF in str(caught.value)
    launched(on_blackwell(moe_runner_backend="triton"), tiny_model, monkeypatch)


def test_so_is_the_engine_of_a_script(on_blackwell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**_: Any) -> Any:
        return SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=on_blackwell()))

    monkeypatch.setattr(sglang, "Engine", engine)
    with pytest.raises(ValueError, match="^engine" + SAID):
        ScriptServer({}, 60.0, False, False)
