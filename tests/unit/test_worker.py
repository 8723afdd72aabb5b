# SPDX-License-Identifier: Apache-2.0
"""Our actor workers and clients: in the place of verl's where the plugin is on, and verl's own in all else."""

from __future__ import annotations

import asyncio
import pickle
from functools import cache
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
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from hydra_run import CONFIG_DIR, composed
from verl_sync_plugin.config.settings import KEY_PREFIX, PREFIX, SHARES_GPU, SyncConfig, sync_config_of
from verl_sync_plugin.errors import HalfWrittenError
from verl_sync_plugin.hooks.trainer import of_separate_rollout, reporting

ROLLOUT, REWARD, LORA = "actor_rollout_ref.rollout", "reward.reward_model", "actor_rollout_ref.model.lora"


WORKERS: dict[Role, type] = {
    Role.ActorRollout: ActorRolloutRefWorker,
    Role.ActorRolloutRef: DetachActorWorker,
    Role.Rollout: type("Stranger", (ActorRolloutRefWorker,), {}),
    Role.Actor: ActorRolloutRefWorker,
    Role.RefPolicy: ActorRolloutRefWorker,
    Role.Critic: TrainingWorker,
}
OURS = {Role.ActorRollout: "SyncActorRolloutRefWorker", Role.ActorRolloutRef: "SyncDetachActorWorker"}


class Verls:
    """The part of verl's trainer that ours extends."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.role_worker_mapping: dict[Any, Any] = {}

    def _init_resource_pool_mgr(self) -> None:
        self.role_worker_mapping = {role: ray.remote(worker) for role, worker in WORKERS.items()}

    def get_llm_client(self) -> Any:
        return FullyAsyncLLMServerClient(self.config, only_hybrid=True)


def begun(config: DictConfig) -> Any:
    """Our trainer, which has chosen its workers."""
    ours: Any = reporting(Verls)(config)
    ours._init_resource_pool_mgr()
    return ours


def resolved(*overrides: str) -> DictConfig:
    """A config as verl's task runner has it."""
    config = composed(*overrides)
    OmegaConf.resolve(config)
    return config


def workers_of(trainer: Any) -> dict[Role, Any]:
    return {role: remote.__ray_actor_class__ for role, remote in trainer.role_worker_mapping.items()}


@pytest.mark.parametrize(
    ("overrides", "ours", "shares_gpu"),
    [
        ((), True, None),
        (("model_engine=megatron",), True, None),
        ((f"{ROLLOUT}.name=vllm",), False, None),
        ((f"{KEY_PREFIX}.enabled=False",), False, None),
        (("model_engine=veomni",), False, None),
        # another engine on the same device gets the cache back
        ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True"), True, None),
        ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=False"), True, True),
    ],
)
def test_only_a_plugin_that_is_on_takes_the_workers_that_hold_a_rollout(
    overrides: tuple[str, ...], ours: bool, shares_gpu: bool | None
) -> None:
    trainer = begun(resolved(*overrides))
    expected = {role: worker.__name__ for role, worker in WORKERS.items()} | (OURS if ours else {})
    assert {role: worker.__name__ for role, worker in workers_of(trainer).items()} == expected
    assert OmegaConf.select(trainer.config, f"{PREFIX}.custom.{SHARES_GPU}") is shares_gpu
    assert not ours or sync_config_of(trainer.config.actor_rollout_ref.rollout) == SyncConfig()


def test_a_config_that_no_driver_has_settled_is_settled_by_the_trainer() -> None:
    """Composed by a program of the user's or by a multirun, and resolved by verl's task runner."""
    config = begun(resolved(f"{LORA}.rank=8", f"{LORA}.merge=True")).config
    assert config.actor_rollout_ref.model.lora_rank == 8
    with pytest.raises(ValueError, match=r"timeout_seconds=-1"):
        begun(resolved(f"{KEY_PREFIX}.timeout_seconds=-1"))
    # verl's flat reference config has none of our keys
    flat: Any = OmegaConf.load(CONFIG_DIR / "_generated_ppo_veomni_trainer.yaml")
    flat.actor_rollout_ref.rollout.name = "sglang"
    OmegaConf.set_struct(flat, True)
    assert workers_of(begun(flat)) == WORKERS
    assert flat.actor_rollout_ref.rollout.custom.sync.enabled is False


@cache
def our_worker() -> Any:
    return workers_of(begun(resolved()))[Role.ActorRollout]


def synced_worker(rollout: Any, backend: str = "naive") -> Any:
    made = object.__new__(our_worker())
    made.rollout, made.layered_summon = rollout, False
    made.config = OmegaConf.create({"rollout": {"checkpoint_engine": {"backend": backend}, "free_cache_engine": True}})
    return made


@pytest.mark.parametrize(
    ("ours", "backend", "mode"),
    [(False, "naive", "auto"), (True, "nccl", "auto"), (True, "naive", "nccl"), (True, "naive", "delta_sharded")],
)
def test_other_rollouts_and_checkpoint_engines_are_verls(
    ours: bool, backend: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", AsyncMock(return_value="verl's"))
    made = synced_worker(SimpleNamespace(makes_room=ours), backend)
    assert asyncio.run(made.update_weights(7, mode)) == "verl's"


# verl's client of separate rollouts, whose servers may die and may answer a call that spans a sync


def client_of(parts: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, of a server whose calls end for these reasons, with these fields."""

    async def generate(**_: Any) -> TokenOutput:
        reason, fields = parts.pop(0)
        return TokenOutput(token_ids=[1], log_probs=[0.0], stop_reason=reason, extra_fields=dict(fields))

    server = SimpleNamespace(generate=SimpleNamespace(remote=generate))
    monkeypatch.setattr(LLMServerClient, "_acquire_server", AsyncMock(return_value=("server", server)))
    monkeypatch.setattr(LLMServerClient, "_release_server", lambda *_, **__: None)
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", AsyncMock())  # before it asks again
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    return of_separate_rollout(FullyAsyncLLMServerClient(config))


SPANNING = {"global_steps": 7, "min_global_steps": 5, "max_global_steps": 7}
WHOLE = {"global_steps": 8}


@pytest.mark.parametrize(
    ("parts", "versions"),
    [
        ([("length", SPANNING)], (5, 7)),
        ([("abort", SPANNING), ("length", WHOLE)], (5, 8)),
        ([("abort", WHOLE), ("length", {"global_steps": 9})], (8, 9)),
        ([("length", {"global_steps": None})], (None, None)),
    ],
)
def test_a_response_names_its_first_and_last_version(
    parts: list[tuple[str, dict[str, Any]]], versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = asyncio.run(client_of(parts, monkeypatch).generate("request", prompt_ids=[1], sampling_params={}))
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == versions and not parts


@pytest.mark.parametrize(
    ("name", "backend", "kind"),
    [
        ("sglang", "sync_plugin", "SeparateLLMServerClient"),
        ("sglang", "nccl", "FullyAsyncLLMServerClient"),
        ("sglang", "naive", "FullyAsyncLLMServerClient"),
        ("vllm", "nccl", "FullyAsyncLLMServerClient"),
    ],
)
def test_the_trainer_hands_out_ours_for_separate_rollouts(name: str, backend: str, kind: str) -> None:
    rollout = {"name": name, "checkpoint_engine": {"backend": backend}}
    ours: Any = reporting(Verls)(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
    client = ours.get_llm_client()
    assert type(client).__name__ == kind and client._only_hybrid
    assert type(pickle.loads(pickle.dumps(client))) is type(client)


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (ActorDiedError(), ["first"]),
        # As Ray raises it here: the driver runs such a sync once more, or ends the run
        (RayTaskError("generate", "", HalfWrittenError("a replica died")).as_instanceof_cause(), []),
    ],
)
def test_what_a_dead_server_or_a_failed_sync_leaves_unanswered_is_asked_again(
    error: Exception, gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server gets the request, and the router forgets the one that died."""
    client = client_of([("length", WHOLE)], monkeypatch)
    asked = AsyncMock(side_effect=error)
    first = ("first", SimpleNamespace(generate=SimpleNamespace(remote=asked)))
    acquired: Any = LLMServerClient._acquire_server
    acquired.side_effect = [first, acquired.return_value]
    remove, clear = AsyncMock(), AsyncMock()
    client._load_balancer = SimpleNamespace(
        remove_servers=SimpleNamespace(remote=remove), clear_sticky_cache=SimpleNamespace(remote=clear)
    )
    output = asyncio.run(client.generate("request", prompt_ids=[1], sampling_params={}))
    assert output.token_ids == [1] and asked.await_count == 1
    assert [each.args for each in remove.await_args_list] == [(gone,)] * len(gone) and clear.await_count == len(gone)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("place", ["meta", "cpu"])  # a meta tensor is on no host, which is all that is asked
def test_only_what_is_on_the_device_is_offloaded(place: str, enabled: bool, listed: bool) -> None:
    module = torch.nn.ParameterList([torch.empty(4, device=place)])
    made = synced_worker(rollout := AsyncMock(makes_room=True, make_room_for_weights=Mock()))
    made.actor = Mock(engine=Mock(is_param_offload_enabled=enabled, module=[module] if listed else module))
    made.actor.engine.get_per_tensor_param.return_value = (), None
    asyncio.run(made.update_weights(7))
    moved = [call("cpu", model=True, optimizer=False, grad=False)]
    assert made.actor.engine.to.mock_calls == (moved if enabled and place == "meta" else [])
    assert rollout.end_sync.await_count == 1
