# SPDX-License-Identifier: Apache-2.0
"""Covers the server actor on a tokenizer manager that notes calls; with a real SGLang: ``test_pause_modes.py``."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import pytest
import sglang
from ray.exceptions import ActorDiedError
from sglang.srt import server_args
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from contract.sglang_models import config_of
from verl_sync_plugin import compat, report
from verl_sync_plugin.config.settings import SEPARATE_BACKEND, TURN_OFF, SyncConfig
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.rollouts import LocalSpec, rollout_of
from verl_sync_plugin.rollouts.adapter import calls_of
from verl_sync_plugin.rollouts.sglang import server as module
from verl_sync_plugin.rollouts.sglang.refusals import keeps_copy
from verl_sync_plugin.rollouts.sglang.request import TOKEN_VARIABLE, hand_down, new_token
from verl_sync_plugin.rollouts.sglang.script_server import ScriptServer
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer, SyncSGLangReplica
from verl_sync_plugin.sync.endpoint import RolloutEndpoint

pytestmark = pytest.mark.anyio  # runs the tests that are coroutines
COLOCATED: dict[str, Any] = {"mode": RolloutMode.HYBRID, "backend": "naive"}
Make = Callable[..., Any]
EVERY = pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])


class Manager:
    """Notes what it is asked for; it answers requests once ``answers`` is set."""

    server_args = SimpleNamespace(tp_size=1, dp_size=1, enable_weights_cpu_backup=False)
    _update_weight_version_if_provided = mock.Mock()

    def __init__(self, answers: bool = False) -> None:
        self.asked: list[str] = []
        self.keys: list[Any] = []
        self.answers = asyncio.Event()
        if answers:
            self.answers.set()
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


async def loaded(server: Any, version: int) -> None:
    await server.load_weights(("sync",), str(version))
    await server.flush_after_load()
    await server.finish_sync([])


async def soon(what: Any) -> Any:
    """Begins it, and returns its task when that has come as far as it can alone."""
    begun = asyncio.ensure_future(what)
    await asyncio.sleep(0.01)
    return begun


def ask(server: Any) -> Any:
    """A request of verl's."""
    return server.generate([1], {"max_new_tokens": 1}, "request")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes our real server actor, as verl makes it, on a tokenizer manager instead of launching SGLang."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    hand_down(new_token())

    def made(
        manager: Any, pause: str = "abort", mode: RolloutMode = RolloutMode.STANDALONE,
        backend: str = SEPARATE_BACKEND, node_rank: int = 0, **start: Any,
    ) -> Any:  # fmt: skip
        engine, custom = CheckpointEngineConfig(backend=backend), {"sync": {"pause": pause}}
        config = RolloutConfig(name="sglang", custom=custom, checkpoint_engine=engine, max_model_len=64, **start)
        server = SyncSGLangHttpServer(config, HFModelConfig(path=tiny_model("qwen2")), mode, [], 0, node_rank, 1, "", 0)
        server.tokenizer_manager = manager
        server.guard_requests()
        server.waited = server._gate.closed
        server._gate.succeed(server._gate.begin())
        return server

    return made


async def test_the_cache_is_flushed_once_and_a_flush_that_fails_locks_the_gate(make: Make) -> None:
    """During the load where the engine is awake; nobody takes the flush of a load that failed for the next one's."""
    manager = Manager()
    server = make(manager, **COLOCATED)
    await loaded(server, 7)
    assert manager.asked == ["load load", "flush"] and server.global_steps == 7
    await server.load_weights(("sync",), "8")
    await server.flush_after_load()
    await asyncio.sleep(0)
    await server.abandon_sync("another rank failed")
    await server.load_weights(("sync",), "8")
    await server.finish_sync([])
    assert manager.asked[2:] == ["load load", "flush", "load load", "flush"]
    manager.flushes = False
    with pytest.raises(RuntimeError, match="could not flush its cache"):
        await loaded(server, 9)
    with pytest.raises(RuntimeError, match="waking up after the sync failed"):
        await ask(server)


async def test_nothing_is_generated_of_made_up_weights_and_anything_of_a_checkpoints(make: Make) -> None:
    none = "the engine has no synced weights: sync weights first"  # in fp8 a checkpoint in bf16 is read without scales
    for begins, waits in (("auto", ("", none)), ("dummy", (none, none))):
        made = (make(Manager(), **COLOCATED, load_format=begins, quantization=each) for each in (None, "fp8"))
        assert tuple(server.waited for server in made) == waits


async def test_new_arguments(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Hands them to verl's own methods, or names them unless they ask for nothing."""
    server = make(Manager(), **COLOCATED)
    for name, more in (("abort_all_requests", {"reject_request": True}), ("resume_generation", {"soon": True})):
        monkeypatch.setattr(SGLangHttpServer, name, newer := AsyncMock())
        await getattr(server, name)(**more)
        assert newer.call_args.kwargs == more
    server = make(Manager(), "retract")
    capsys.readouterr()
    await server.sleep(reset_connector=True, level=None)
    await server.abort_all_requests(reject_request=False)
    said = capsys.readouterr().out
    assert "sleep does not use what this verl gives it: reset_connector=True\n" in said and "reject" not in said
    server = make(other := Manager(), "retract", node_rank=1)  # of another host, which asks for nothing
    await server.abort_all_requests()
    await server.resume_generation()
    assert other.asked == []


def test_a_server_that_died_is_named_with_what_to_do_then() -> None:
    died: Future[Any] = Future()
    died.set_exception(ActorDiedError())
    server = SimpleNamespace(resume_tags=SimpleNamespace(remote=lambda tags: SimpleNamespace(future=lambda: died)))
    leader = RolloutEndpoint(rollout_of("sglang"), calls_of(server, "restart the run"), (0,), True, 1.0)
    with pytest.raises(RuntimeError, match=r"the rollout server died, and its engine with it \(.*\); restart the run"):
        asyncio.run(leader.resume(["weights"]))


@EVERY
async def test_who_resumes_during_a_load_waits_for_its_end(pause: str, make: Make) -> None:
    """A load that nobody has given up yet may be half done all the same."""
    manager = Manager()
    server = make(manager, pause)
    for ends, version in ((server.abandon_sync("the trainer died"), 7), (server.finish_sync([]), 8)):
        await server.load_weights(("sync",), str(version))
        manager.asked.clear()
        resumed = await soon(server.resume_generation())
        assert "continue" not in manager.asked and not resumed.done()
        await ends
        (answer,) = await asyncio.gather(resumed, return_exceptions=True)
        assert isinstance(answer, HalfWrittenError) is (version == 7) is ("continue" not in manager.asked)


@pytest.mark.parametrize(("load", "given"), [("load_weights", (("s",), "7")), ("load_adapter", ({}, b"", [], "7"))])
async def test_a_sync_that_is_given_up_while_requests_end_is_not_loaded(load: str, given: Any, make: Make) -> None:
    manager = Manager()
    server = make(manager)
    call = await soon(ask(server))
    loading = await soon(getattr(server, load)(*given))
    assert manager.aborted and manager.asked == []
    await server.abandon_sync("the trainer gave up")
    manager.answers.set()
    with pytest.raises(RuntimeError, match="gave this sync up"):
        await loading
    assert manager.asked == ["pause abort"] and (await call).token_ids == [1]
    with pytest.raises(HalfWrittenError, match="half written: the trainer gave up"):
        await ask(server)


async def test_an_adapter_is_looked_at_where_it_lies(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang says that it has loaded one of which it has left factors out."""
    server, replaced = make(Manager()), AsyncMock()
    monkeypatch.setattr(compat, "replace_adapter", replaced)
    monkeypatch.setattr(server, "ask_ranks", AsyncMock(side_effect=[[""], ["no q_proj"]]))  # before it and after
    with pytest.raises(ValueError, match="no q_proj"):
        await server.load_adapter({}, b"", [("q_proj", 1, 1)], "7")
    replaced.assert_awaited_once()


async def test_a_released_cache_is_not_flushed_after_a_load(make: Make) -> None:
    """SGLang would end itself (sglang #19029)."""
    server = make(manager := Manager())
    await server.release_tags(["kv_cache"])
    await server.load_weights(("sync",), "1")
    await server.flush_after_load()
    await asyncio.sleep(0)
    assert "flush" not in manager.asked[manager.asked.index("release kv_cache") :]


@pytest.mark.parametrize("pause", ["abort", "retract"])
async def test_a_pause_that_fails_holds_nobody(pause: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(answers=True)
    server = make(manager, pause)
    monkeypatch.setattr(manager, "pause_generation", AsyncMock(side_effect=OSError("SGLang is gone")))
    with pytest.raises(OSError, match="SGLang is gone"):
        await server.abort_all_requests()
    assert (await asyncio.wait_for(ask(server), 1)).token_ids == [1]


async def test_nothing_is_loaded_into_released_weights(make: Make) -> None:
    server = make(Manager())
    await server.release_tags(["weights"])
    with pytest.raises(RuntimeError, match="weights are released"):
        await server.load_weights(("sync",), "1")
    await server.resume_tags(["weights"])
    await loaded(server, 1)


async def test_a_sync_that_nobody_ends_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "agreement_seconds", lambda seconds: 0.01)
    manager = Manager()
    server = make(manager, "retract")
    await server.load_weights(("sync",), "7")
    with pytest.raises(HalfWrittenError, match=r"under way for 0\.01 s, and nobody has said that it is over"):
        await server.resume_generation()
    assert "continue" not in manager.asked
    await loaded(server, 8)
    assert manager.asked[-1] == "continue"


@EVERY
@pytest.mark.parametrize("fails", [False, True])
async def test_a_late_end_is_not_the_next(pause: str, fails: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a server that stands still in a sync's last step until that was given up and the next one loads."""
    manager, resumed = Manager(), asyncio.Event()
    server = make(manager, pause)

    async def resume(obj: Any, request: None) -> None:
        await resumed.wait()
        if fails:
            raise OSError("SGLang is gone")

    await server.sleep()
    await server.load_weights(("sync",), "1")
    with monkeypatch.context() as patched:
        patched.setattr(manager, "resume_memory_occupation", resume)
        late = await soon(server.finish_sync(["kv_cache"]))
        await server.abandon_sync("no answer")
        await server.load_weights(("sync",), "2")
        resumed.set()
        (answer,) = await asyncio.gather(late, return_exceptions=True)
    assert isinstance(answer, OSError if fails else RuntimeError), answer
    assert server.global_steps is None and "continue" not in manager.asked
    await server.finish_sync([])
    assert server.global_steps == 2 and manager.asked[-1] == "continue"


async def test_requests_share_prefixes_of_the_same_weights_only(make: Make) -> None:
    """Answers of a real SGLang: ``tests/contract/test_pause_modes.py``."""
    manager = Manager(answers=True)
    server = make(manager, "in_place")
    for number in (1, 2):
        await ask(server)
        for given in ("salt", ["a", None]):  # SGLang's own door; verl's sets none
            request = GenerateReqInput(input_ids=[1], extra_key=given)  # type: ignore[arg-type]
            assert [answer async for answer in manager.generate_request(request)]
        now = f"weights-{number}:"
        assert manager.keys[-3:] == [now, f"{now}salt", [f"{now}a", now]]
        await loaded(server, 7)
    await asyncio.sleep(0.01)
    assert manager.closed == len(manager.keys), "SGLang's lock is held as long as an answer stays open"


async def test_requests_that_outlive_an_abort_are_aborted_again_and_a_load_waits_for_them(make: Make) -> None:
    """One whose images are being read, say, comes to SGLang's scheduler after the abort."""
    manager = Manager()
    server = make(manager, **COLOCATED)
    call = await soon(ask(server))
    load = asyncio.ensure_future(server.load_weights(("sync",), "7"))
    await asyncio.sleep(2.5 * module.AGAIN_SECONDS)
    assert manager.aborted == 3 and manager.asked == []
    manager.answers.set()
    await asyncio.gather(call, load)
    assert manager.asked == ["flush", "load load"]


def test_all_schedulers_have_to_flush() -> None:
    """With DP attention there are several, and SGLang's own call answers as the first one does."""
    for second, key in itertools.product((True, False), ("dp_size", "attn_dp_size")):
        asked = AsyncMock(return_value=[SimpleNamespace(success=each) for each in (True, second)])
        manager = mock.Mock(config_value={"dp_size": 1, key: 2}.get, flush_cache_communicator=asked)
        assert asyncio.run(compat.flush_cache(manager)) == second


def test_an_adapter_is_replaced_that_sglang_counts_as_used_for_good() -> None:
    """Up to 0.5.21 by requests that it has refused, or aborted in its queue; and one of which only some ranks know."""
    from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

    registry = LoRARegistry()

    async def unload(request: Any) -> Any:
        if not manager.pending_lora_unloads.pop(request.lora_name, ""):
            await registry.wait_for_unload(await registry.unregister(request.lora_name))
        return SimpleNamespace(success=True)

    async def replace() -> None:
        await registry.register(LoRARef(lora_name="a", lora_path="b"))
        await registry.acquire("a")
        await asyncio.wait_for(compat.replace_adapter(manager, "a", {}, b""), 5)

    idle, load = AsyncMock(return_value=False), AsyncMock(return_value=SimpleNamespace(success=True))
    given = {"server_args.tp_size": 1, "model_update_lock.is_locked": idle, "load_lora_adapter_from_tensors": load}
    manager = mock.Mock(lora_registry=registry, unload_lora_adapter=unload, pending_lora_unloads={}, **given)
    asyncio.run(replace())
    manager.pending_lora_unloads["a"] = "1"
    asyncio.run(compat.replace_adapter(manager, "a", {}, b""))
    assert load.await_count == 2 and not manager.pending_lora_unloads


def test_a_scripts_engine_releases_memory_once_it_is_idle() -> None:
    """SGLang ends itself when it is asked to release a moment after its last answer."""
    server, flushed = object.__new__(ScriptServer), SimpleNamespace(success=True, message="")
    manager = server.tokenizer_manager = AsyncMock(flush_cache=AsyncMock(return_value=flushed), config_value={}.get)
    server.expect_updates(1.0, needs_sync=False)
    asyncio.run(server.release_tags(["kv_cache"]))
    asyncio.run(server.release_tags(["weights"]))  # nothing can have run since
    assert [name for name, *_ in manager.method_calls] == ["flush_cache", *["release_memory_occupation"] * 2]
    server.expect_updates(1.0, needs_sync=False)
    flushed.success = False
    with pytest.raises(RuntimeError, match="the engine still generates"):
        asyncio.run(server.release_tags(["kv_cache"]))


def test_unlogged_metrics_are_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As with a trainer that another plugin registered after ours, or verl's legacy one."""
    monkeypatch.setattr(report, "_said", set())
    monkeypatch.setattr(SyncSGLangReplica, "launch_servers", AsyncMock())
    for enabled, said in ((False, 0), (True, 1), (True, 0)):
        config: Any = RolloutConfig(name="sglang", tensor_model_parallel_size=1, custom={"sync": {"enabled": enabled}})
        replica = SyncSGLangReplica(0, config, SimpleNamespace(path="nowhere"), gpus_per_node=1)
        asyncio.run(replica.init_hybrid(SimpleNamespace(workers=[])))
        assert replica.max_concurrency > 64 * config.max_num_seqs, "calls of a sync would wait for waiting requests"
        assert replica.syncs_weights is enabled and capsys.readouterr().out.count("NO SYNC METRICS") == said


def test_sglang_loads_into_the_target_and_not_into_the_draft(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)  # of the engine's ranks
    target, draft = (SimpleNamespace(update_weights_from_tensor=mock.Mock(return_value=(True, ""))) for _ in range(2))
    scheduler: Any = SimpleNamespace(
        tp_worker=target, draft_worker=draft, tp_cpu_group=None, flush_cache_after_weight_update=lambda request: None
    )

    class Engine(Manager):
        async def update_weights_from_tensor(self, obj: Any, request: None) -> tuple[bool, str]:
            answer = SchedulerUpdateWeightsMixin.update_weights_from_tensor(scheduler, obj)
            return answer.success, answer.message

    asyncio.run(make(Engine()).load_weights(("sync",), "1"))
    assert target.update_weights_from_tensor.called and not draft.update_weights_from_tensor.called


@pytest.mark.parametrize(("arguments", "kept"), [
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/a/draft"}, (True, "auto")),
    ({"speculative_algorithm": "NGRAM"}, (None, None)), ({"enable_weights_cpu_backup": True}, (None, None)),
])  # fmt: skip
def test_a_draft_is_loaded_from_its_checkpoint_and_kept_while_the_engine_sleeps(
    arguments: dict[str, Any], kept: tuple[Any, Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sends the draft's weights, and verl's default loads random ones. Any host copy is allocated once."""
    monkeypatch.setattr(SGLangHttpServer, "launch_server", AsyncMock())
    monkeypatch.setattr(os, "environ", {})
    server = make(Manager(), **COLOCATED)
    server.config.engine_kwargs["sglang"] = dict(arguments)
    asyncio.run(server.launch_server())
    launch = server.config.engine_kwargs["sglang"]
    assert (launch.get("enable_draft_weights_cpu_backup"), launch.get("speculative_draft_load_format")) == kept
    assert ("TMS_RETAIN_CPU_BACKUP" in os.environ) is ("NGRAM" not in arguments.values())


def test_a_class_that_the_checkpoint_does_not_name_keeps_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keeps_copy(["Qwen2ForCausalLM"], {})
    assert keeps_copy(["Qwen2ForCausalLM"], {"json_model_override_args": '{"architectures": ["Other"]}'})
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "package")
    assert keeps_copy(["Qwen2ForCausalLM"], {})


SAID = r"\.moe_runner_backend='flashinfer_trtllm' \(as SGLang resolved it at its launch\): .* Set \S+=triton"


def test_experts_blackwell_reorders_are_refused(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's, and a script's, by SGLang's own arguments, resolved as on a Blackwell GPU."""
    model = {**config_of("qwen3-moe"), "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr(server_args, "is_sm100_supported", lambda: True)
    monkeypatch.setattr(SGLangHttpServer, "launch_server", AsyncMock())

    def launched(**given: Any) -> Any:
        resolved = server_args.ServerArgs(
            model_path=str(tmp_path), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            disable_cuda_graph=True, **given,
        )  # fmt: skip
        return SimpleNamespace(server_args=resolved, generate_request=None)

    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang" + SAID) as caught:
        asyncio.run(make(launched(), **COLOCATED).launch_server())
    assert TURN_OFF in str(caught.value)
    quantized = launched(moe_runner_backend="triton")
    quantized.model_config = SimpleNamespace(quantization="modelopt_fp8")  # by a file next to the checkpoint
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang\.quantization='modelopt_fp8' \(as SGLang resolved it"):
        asyncio.run(make(quantized, **COLOCATED).launch_server())
    asyncio.run(make(launched(moe_runner_backend="triton"), **COLOCATED).launch_server())
    monkeypatch.setattr(sglang, "Engine", lambda **_: SimpleNamespace(tokenizer_manager=launched()))
    launch = rollout_of("sglang").prepare_local(LocalSpec("folder", {}, 1, "bfloat16", 0.4, False, False, SyncConfig()))
    with pytest.raises(ValueError, match="^engine" + SAID):
        ScriptServer(*launch.arguments)
