# SPDX-License-Identifier: Apache-2.0
"""Which adapter and server an engine gets by its role: ours where a sync comes, verl's own everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_sync_plugin.rollouts.sglang.adapter import SyncServerAdapter
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangReplica
from verl_sync_plugin.trainers import shard_stream

OFF = {"sync": {"enabled": False}}


def rollout(backend: str = "naive", custom: dict[str, Any] | None = None) -> RolloutConfig:
    engine = CheckpointEngineConfig(backend=backend)
    return RolloutConfig(name="sglang", tensor_model_parallel_size=1, checkpoint_engine=engine, custom=custom)


@pytest.fixture
def model(tiny_model: Callable[[str], str]) -> Any:
    """As verl hands it over for a teacher: with a path and nothing else."""
    return OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": tiny_model("qwen2")})


@pytest.mark.parametrize(
    ("config", "mesh", "adapter"),
    [
        (rollout(), None, ServerAdapter),  # a teacher's or a reward model's
        (rollout(custom=OFF), None, ServerAdapter),
        (rollout("nccl"), None, ServerAdapter),
        (rollout("sync_plugin"), None, SyncServerAdapter),
        (rollout("sync_plugin", OFF), None, ServerAdapter),
        (rollout(), {"infer_tp": None}, SyncServerAdapter),
        (rollout(custom=OFF), {"infer_tp": None}, ServerAdapter),
    ],
)
def test_the_adapter_is_ours_only_where_a_sync_comes(
    config: RolloutConfig, mesh: Any, adapter: type, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    made = SyncServerAdapter(config=config, model_config=model, device_mesh=mesh)
    assert type(made) is adapter and shard_stream.taken_over() == (adapter is SyncServerAdapter)
    shard_stream.take_over(False)


@pytest.mark.parametrize("role", [{"is_teacher_model": True}, {"is_reward_model": True}])
def test_the_server_of_another_role_is_verls(role: dict[str, bool], model: Any) -> None:
    made = SyncSGLangReplica(0, rollout(), model, 1, **role)
    assert not made.syncs_weights and made.server_class.__ray_actor_class__ is SGLangHttpServer
