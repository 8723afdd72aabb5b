# SPDX-License-Identifier: Apache-2.0
"""Covers our trainer, its actor workers and its clients, in the place of verl's where the plugin is on."""

import asyncio
import math
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import ActorDiedError, RayTaskError
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from hydra_run import CONFIG_DIR, composed
from verl_sync_plugin.config.settings import KEY_PREFIX, ROLLOUT, SHARES_GPU, SyncConfig, sync_config_of
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.report import SyncReport

REWARD, LORA = "reward.reward_model", "actor_rollout_ref.model.lora"


WORKERS: dict[Role, type] = {
    Role.ActorRollout: ActorRolloutRefWorker,
    Role.ActorRolloutRef: DetachActorWorker,
    Role.Rollout: type("Stranger", (ActorRolloutRefWorker,), {}),
    Role.Actor: ActorRolloutRefWorker,
    Role.RefPolicy: ActorRolloutRefWorker,
    Role.Critic: TrainingWorker,
}
OURS = {Role.ActorRollout: "SyncActorRolloutRefWorker", Role.ActorRolloutRef: "SyncDetachActorWorker"}


TRAINER = get_trainer_cls("sync")  # ours; verl's comes after the plugin's mixin
STOCK = TRAINER.__mro__[2]


def ours_of(patch: pytest.MonkeyPatch, config: Any, **steps: Any) -> Any:
    """Our trainer, of which nothing is set up; these take the place of verl's steps."""
    for name, step in steps.items():
        patch.setattr(STOCK, name, step)
    ours: Any = object.__new__(TRAINER)
    ours.config = config
    return ours


def begun(patch: pytest.MonkeyPatch, config: DictConfig) -> Any:
    """Our trainer, which has chosen its workers."""

    def mapped(ours: Any) -> None:
        ours.role_worker_mapping = {role: ray.remote(worker) for role, worker in WORKERS.items()}

    ours = ours_of(patch, config, _init_resource_pool_mgr=mapped)
    ours._init_resource_pool_mgr()
    return ours


def resolved(*overrides: str) -> DictConfig:
    """A config as verl's task runner has it."""
    config = composed(*overrides)
    OmegaConf.resolve(config)
    return config


def rollout_config(name: str = "sglang", backend: str = "sync_plugin") -> DictConfig:
    rollout = {"name": name, "checkpoint_engine": {"backend": backend}}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})


def workers_of(trainer: Any) -> dict[Role, Any]:
    return {role: remote.__ray_actor_class__ for role, remote in trainer.role_worker_mapping.items()}


@pytest.mark.parametrize(("overrides", "ours", "shares_gpu"), [
    ((), True, None),
    (("model_engine=megatron",), True, None),
    ((f"{ROLLOUT}.name=vllm",), False, None),
    ((f"{KEY_PREFIX}.enabled=False",), False, None),
    (("model_engine=veomni",), False, None),
    # another engine on the same device gets the cache back
    ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True"), True, None),
    ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=False"), True, True),
])  # fmt: skip
def test_only_a_plugin_that_is_on_takes_the_workers_that_hold_a_rollout(
    overrides: tuple[str, ...], ours: bool, shares_gpu: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begun(monkeypatch, resolved(*overrides))
    expected = {role: worker.__name__ for role, worker in WORKERS.items()} | (OURS if ours else {})
    assert {role: worker.__name__ for role, worker in workers_of(trainer).items()} == expected
    assert OmegaConf.select(trainer.config, f"{ROLLOUT}.custom.{SHARES_GPU}") is shares_gpu
    assert not ours or sync_config_of(trainer.config.actor_rollout_ref.rollout) == SyncConfig()


def test_a_config_that_no_driver_has_settled_is_settled_by_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed by a program of the user's or by a multirun, and resolved by verl's task runner."""
    config = begun(monkeypatch, resolved(f"{LORA}.rank=8", f"{LORA}.merge=True")).config
    assert config.actor_rollout_ref.model.lora_rank == 8
    with pytest.raises(ValueError, match=r"timeout_seconds=-1"):
        begun(monkeypatch, resolved(f"{KEY_PREFIX}.timeout_seconds=-1"))
    # verl's flat reference config has none of our keys
    flat: Any = OmegaConf.load(CONFIG_DIR / "_generated_ppo_veomni_trainer.yaml")
    flat.actor_rollout_ref.rollout.name = "sglang"
    OmegaConf.set_struct(flat, True)
    assert workers_of(begun(monkeypatch, flat)) == WORKERS
    assert flat.actor_rollout_ref.rollout.custom.sync.enabled is False


def synced(patch: pytest.MonkeyPatch, rollout: Any, backend: str = "naive") -> Any:
    """Our worker of a rollout."""
    worker: Any = object.__new__(workers_of(begun(patch, resolved()))[Role.ActorRollout])
    worker.rollout, worker.layered_summon = rollout, False
    settings = {"rollout": {"checkpoint_engine": {"backend": backend}, "free_cache_engine": True}}
    worker.config = OmegaConf.create(settings)
    return worker


@pytest.mark.parametrize(
    ("ours", "backend", "mode"),
    [(False, "naive", "auto"), (True, "nccl", "auto"), (True, "naive", "nccl"), (True, "naive", "delta_sharded")],
)
def test_what_is_verls_is_left_to_verl(ours: bool, backend: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", AsyncMock(return_value="verl's"))
    made = synced(monkeypatch, SimpleNamespace(makes_room=ours), backend)
    assert asyncio.run(made.update_weights(7, mode)) == "verl's"


def test_active_in_every_step_of_a_run_that_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step without a sync, as verl's separate trainers have them, and never without a replica of ours."""
    reports: list[Any] = [None]
    monkeypatch.setattr(ray, "get", lambda report: report)
    server = SimpleNamespace(take_sync_report=SimpleNamespace(remote=lambda: reports[-1]))
    ours, stock = SimpleNamespace(syncs_weights=True, servers=[server]), SimpleNamespace()
    stepped = ours_of(monkeypatch, None, on_step_end=lambda it: vars(it).update(_pending_sync_metrics={"theirs": 2.0}))
    stepped.timing_raw = {}
    for replicas, expected in (([stock], {"theirs": 2.0}), ([stock, ours], {"theirs": 2.0, "sync/active": 1.0})):
        stepped.checkpoint_manager = SimpleNamespace(replicas=replicas)
        stepped.on_step_end()
        assert stepped._pending_sync_metrics == expected and not stepped.timing_raw
    reports.append(SyncReport(3, tensors=7, stages={"update_weights": 2.0}).as_dict())
    stepped.on_step_end()
    assert stepped._pending_sync_metrics["sync/tensors"] == 7.0 and stepped.timing_raw["sync/phase"] == 2.0


DIFFERENCE = "training/rollout_probs_diff_mean"


@pytest.mark.parametrize(("most", "mean", "valid", "said"), [
    (None, 0.9, 1, ""),
    (0.02, 0.02, 1, ""),
    (0.02, math.nan, 0, ""),  # there is no token
    *((0.02, mean, 1, rf"{DIFFERENCE}={mean} .*\.max_probs_diff=0.02.*raise") for mean in (0.021, math.nan)),
    (0.02, None, 1, f"verl logged no {DIFFERENCE}, which .*max_probs_diff=0.02"),
])  # fmt: skip
def test_a_difference_of_probabilities_beyond_the_key_stops_the_run(
    most: float | None, mean: float | None, valid: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before verl's update of the actor, with step, value and key."""

    def compare(_: Any, batch: str, metrics: dict[str, Any]) -> str:
        metrics.update({} if mean is None else {DIFFERENCE: mean, DIFFERENCE.replace("mean", "valid"): valid})
        return batch + " scored"

    config = rollout_config()
    OmegaConf.update(config, f"{ROLLOUT}.custom.sync.max_probs_diff", most, force_add=True)
    stepped = ours_of(monkeypatch, config, _compute_old_log_prob=compare)
    stepped.global_steps = 7
    with pytest.raises(RuntimeError, match=f"step 7: {said}") if said else nullcontext():
        assert stepped._compute_old_log_prob("batch", metrics={}) == "batch scored"


Parts = list[tuple[str, dict[str, Any]]]


def client_of(patch: pytest.MonkeyPatch, parts: Parts, config: DictConfig | None = None) -> Any:
    """The trainer's, of a server whose calls end for these reasons, with these fields."""

    async def generate(**_: Any) -> TokenOutput:
        reason, fields = parts.pop(0)
        return TokenOutput(token_ids=[1], log_probs=[0.0], stop_reason=reason, extra_fields=dict(fields))

    server = SimpleNamespace(generate=SimpleNamespace(remote=generate))
    patch.setattr(LLMServerClient, "_acquire_server", AsyncMock(return_value=("server", server)))
    patch.setattr(LLMServerClient, "_release_server", lambda *_, **__: None)
    patch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", AsyncMock())  # before it asks again

    def verls(ours: Any) -> Any:
        return FullyAsyncLLMServerClient(ours.config, only_hybrid=True)

    return ours_of(patch, config or rollout_config(), get_llm_client=verls).get_llm_client()


SPANNING = {"global_steps": 7, "min_global_steps": 5, "max_global_steps": 7}
WHOLE = {"global_steps": 8}


@pytest.mark.parametrize(("parts", "versions"), [
    ([("length", SPANNING)], (5, 7)),
    ([("abort", SPANNING), ("length", WHOLE)], (5, 8)),
    ([("abort", WHOLE), ("length", {"global_steps": 9})], (8, 9)),
    ([("length", {"global_steps": None})], (None, None)),
])  # fmt: skip
def test_versions_of_a_response(parts: Parts, versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    output = asyncio.run(client_of(monkeypatch, parts).generate("request", prompt_ids=[1], sampling_params={}))
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == versions and not parts


@pytest.mark.parametrize(("name", "backend", "kind"), [
    ("sglang", "sync_plugin", "SeparateLLMServerClient"),
    ("sglang", "nccl", "FullyAsyncLLMServerClient"),
    ("sglang", "naive", "FullyAsyncLLMServerClient"),
    ("vllm", "nccl", "FullyAsyncLLMServerClient"),
])  # fmt: skip
def test_separate_rollouts_get_our_client(name: str, backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = client_of(monkeypatch, [], rollout_config(name, backend))
    assert type(found).__name__ == kind and found._only_hybrid
    assert type(pickle.loads(pickle.dumps(found))) is type(found)


@pytest.mark.parametrize(("error", "gone"), [
    (ActorDiedError(), ["first"]),
    # As Ray raises it here: the driver runs such a sync once more, or ends the run
    (RayTaskError("generate", "", HalfWrittenError("a replica died")).as_instanceof_cause(), []),
])  # fmt: skip
def test_the_unanswered_is_asked_again(error: Exception, gone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server gets the request, and the router forgets the one that died."""
    ours = client_of(monkeypatch, [("length", WHOLE)])
    first = ("first", SimpleNamespace(generate=SimpleNamespace(remote=AsyncMock(side_effect=error))))
    acquired: Any = LLMServerClient._acquire_server
    acquired.side_effect = [first, acquired.return_value, ActorDiedError()]
    remove, clear = AsyncMock(), AsyncMock()
    ours._load_balancer = SimpleNamespace(
        remove_servers=SimpleNamespace(remote=remove), clear_sticky_cache=SimpleNamespace(remote=clear)
    )
    output = asyncio.run(ours.generate("request", prompt_ids=[1], sampling_params={}))
    assert output.token_ids == [1]
    assert [each.args for each in remove.await_args_list] == [(gone,)] * len(gone) and clear.await_count == len(gone)
    with pytest.raises(ActorDiedError):  # the router itself
        asyncio.run(ours.generate("request", prompt_ids=[1], sampling_params={}))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("place", ["meta", "cpu"])  # a meta tensor is on no host, which is all that is asked
def test_only_device_memory_is_moved(place: str, enabled: bool, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.ParameterList([torch.empty(4, device=place)])
    made = synced(monkeypatch, rollout := AsyncMock(makes_room=True, make_room_for_weights=Mock()))
    made.actor = Mock(engine=Mock(is_param_offload_enabled=enabled, module=[module] if listed else module))
    made.actor.engine.get_per_tensor_param.return_value = (), None
    asyncio.run(made.update_weights(7))
    moved = [call("cpu", model=True, optimizer=False, grad=False)]
    assert made.actor.engine.to.mock_calls == (moved if enabled and place == "meta" else [])
    assert rollout.end_sync.await_count == 1
