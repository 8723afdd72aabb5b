# SPDX-License-Identifier: Apache-2.0
"""Our actor workers: in the place of verl's, called as verl calls its own, and silent until the model is there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import unmeasured
from verl_sync_plugin.config.settings import (
    DEFAULT_MEGABYTES,
    KEY_PREFIX,
    PREFIX,
    SHARES_GPU,
    SyncConfig,
    sync_config_of,
)
from verl_sync_plugin.hooks import trainer, worker

CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"
PAIRS = [(ActorRolloutRefWorker, worker.SyncActorRolloutRefWorker), (DetachActorWorker, worker.SyncDetachActorWorker)]


def test_sglang_is_not_there_before_the_model() -> None:
    """Once SGLang is imported, transformers builds models with uninitialized rotary frequencies."""
    code = "import sys, verl_sync_plugin.hooks.worker, verl_sync_plugin.hooks.trainer; print('sglang' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=unmeasured.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.split()[-1:] == ["False"], ended.stdout + ended.stderr


def test_roles_with_a_rollout_get_ours() -> None:
    stranger = type("Stranger", (ActorRolloutRefWorker,), {})
    mapping: dict[Any, Any] = {
        Role.ActorRollout: ray.remote(ActorRolloutRefWorker),
        Role.ActorRolloutRef: ray.remote(DetachActorWorker),
        Role.Rollout: ray.remote(stranger),
        Role.Actor: ray.remote(ActorRolloutRefWorker),
        Role.RefPolicy: ray.remote(ActorRolloutRefWorker),
        Role.Critic: ray.remote(TrainingWorker),
    }
    before = dict(mapping)
    trainer.take_workers(mapping)
    assert mapping[Role.ActorRollout].__ray_actor_class__ is worker.SyncActorRolloutRefWorker
    assert mapping[Role.ActorRolloutRef].__ray_actor_class__ is worker.SyncDetachActorWorker
    for role in (Role.Rollout, Role.Actor, Role.RefPolicy, Role.Critic):
        assert mapping[role] is before[role]


class Verls:
    """The part of verl's trainer that our mixin extends."""

    def __init__(self, *overrides: str) -> None:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            self.config = compose("ppo_trainer", overrides=list(overrides))
        OmegaConf.resolve(self.config)  # as verl's task runner
        self.role_worker_mapping: dict[Any, Any] = {}

    def _init_resource_pool_mgr(self) -> None:
        self.role_worker_mapping = {Role.ActorRollout: ray.remote(ActorRolloutRefWorker)}


class Ours(trainer.SyncTrainerMixin, Verls):
    def worker(self) -> type:
        self._init_resource_pool_mgr()
        found: type = self.role_worker_mapping[Role.ActorRollout].__ray_actor_class__
        return found


ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.name=sglang"


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [
        ((SGLANG,), True),
        ((SGLANG, "model_engine=megatron"), True),
        ((f"{ROLLOUT}.name=vllm",), False),
        ((SGLANG, f"{KEY_PREFIX}.enabled=False"), False),
        ((SGLANG, "model_engine=veomni"), False),
    ],
)
def test_only_a_plugin_that_is_on_takes_the_worker(overrides: tuple[str, ...], ours: bool) -> None:
    assert Ours(*overrides).worker() is PAIRS[0][ours]


def test_a_config_that_no_driver_has_settled_is_settled_by_the_trainer() -> None:
    """Composed by a program of the user's or by a multirun, and resolved by verl's task runner."""
    ours = Ours(SGLANG, "actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=True")
    ours.worker()
    rollout = ours.config.actor_rollout_ref.rollout
    assert ours.config.actor_rollout_ref.model.lora_rank == 8
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == DEFAULT_MEGABYTES
    with pytest.raises(ValueError, match=r"timeout_seconds=-1"):
        Ours(SGLANG, f"{KEY_PREFIX}.timeout_seconds=-1").worker()


def test_verls_flat_reference_config_has_none_of_our_keys_and_runs() -> None:
    ours = Ours(SGLANG)
    flat: Any = OmegaConf.load(CONFIG_DIR / "_generated_ppo_veomni_trainer.yaml")
    flat.actor_rollout_ref.rollout.name = "sglang"
    ours.config = OmegaConf.create(flat)
    OmegaConf.set_struct(ours.config, True)
    assert ours.worker() is PAIRS[0][False]
    assert ours.config.actor_rollout_ref.rollout.custom.sync.enabled is False


REWARD = "reward.reward_model"


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ((), None),
        ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True"), None),
        ((f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=False"), True),
    ],
)
def test_another_engine_on_the_same_device_gets_the_cache_back(
    overrides: tuple[str, ...], setting: bool | None
) -> None:
    ours = Ours(SGLANG, *overrides)
    ours.worker()
    assert OmegaConf.select(ours.config, f"{PREFIX}.custom.{SHARES_GPU}") is setting
    assert sync_config_of(ours.config.actor_rollout_ref.rollout) == SyncConfig()


class VerlsWorker:
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> str:
        return f"verl's: {global_steps} {mode}"


@pytest.mark.parametrize(
    ("ours", "backend", "mode"),
    [(False, "naive", "auto"), (True, "nccl", "auto"), (True, "naive", "nccl"), (True, "naive", "delta_sharded")],
)
def test_other_rollouts_and_checkpoint_engines_are_verls(ours: bool, backend: str, mode: str) -> None:
    made: Any = type("Worker", (worker.SyncWorkerMixin, VerlsWorker), {})()
    made.rollout = SimpleNamespace(makes_room=ours)
    made.config = OmegaConf.create({"rollout": {"checkpoint_engine": {"backend": backend}, "free_cache_engine": True}})
    assert asyncio.run(made.update_weights(7, mode)) == f"verl's: 7 {mode}"
