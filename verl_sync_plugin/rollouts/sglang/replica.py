# SPDX-License-Identifier: Apache-2.0
"""The rollout replica in the task runner: verl's own, with our server actor class."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from verl_sync_plugin.config.settings import SEPARATE_BACKEND, sync_config_of
from verl_sync_plugin.log import say
from verl_sync_plugin.report import say_without_metrics
from verl_sync_plugin.rollouts.sglang.request import new_token
from verl_sync_plugin.rollouts.sglang.server import SyncSGLangHttpServer


class SyncSGLangReplica(SGLangReplica):
    """Uses ``SyncSGLangHttpServer`` for the actor's rollout; reward and teacher models keep verl's server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serves_actor = not (self.is_reward_model or self.is_teacher_model)
        self.syncs_weights = serves_actor and sync_config_of(self.config).enabled
        if self.syncs_weights:
            self.server_class = ray.remote(server_of_one_engine())
            say(f"task runner: replica {self.replica_rank} is ours")

    async def init_hybrid(self, *args: Any, **kwargs: Any) -> Any:
        """Hybrid replicas share GPUs and weights with the trainer that makes them, in the trainer's process."""
        if self.syncs_weights:
            say_without_metrics()
        return await super().init_hybrid(*args, **kwargs)

    async def init_standalone(self, *args: Any, **kwargs: Any) -> Any:
        """Standalone replicas get their weights from a checkpoint engine; if it is one of verl's, they keep verl's
        server."""
        if self.config.checkpoint_engine.backend != SEPARATE_BACKEND:
            self._be_stock()
        return await super().init_standalone(*args, **kwargs)

    async def init_colocated(self, *args: Any, **kwargs: Any) -> Any:
        """Colocated replicas share GPUs with a trainer but not its weights, and keep verl's server."""
        self._be_stock()
        return await super().init_colocated(*args, **kwargs)

    def _be_stock(self) -> None:
        self.syncs_weights = False
        self.server_class = ray.remote(SGLangHttpServer)


def server_of_one_engine() -> Any:
    """Our server class with a token of its own: verl makes the servers of all hosts from one class, and hands nothing
    else of ours to them."""
    return type(SyncSGLangHttpServer.__name__, (SyncSGLangHttpServer,), {"engine_token": new_token()})
