# SPDX-License-Identifier: Apache-2.0
"""verl's driver of the syncs of separate rollouts: it goes on without replicas that die, in few calls."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from verl_sync_plugin.log import say

_WORKER = ray.remote(CheckpointEngineWorker)
ANSWER_SECONDS = 20.0  # a process that is dead is known at once; one that is busy may take longer, and is not dead


class OutlivingManager(CheckpointEngineManager):
    """verl's manager; a replica that dies costs the sync under way, which is run again without it.

    Args:
        manager: verl's own, whose place this one takes.
        servers: verl's manager of the separate rollout's servers, which routes requests to them.
    """

    def __init__(self, manager: CheckpointEngineManager, servers: Any) -> None:
        super().__init__(manager.config, manager.actor_wg, manager.replicas)
        self._servers = servers
        self._joined: list[Any] = []  # whose group stands, since their last sync went well
        self._rollout: Any = None  # verl's worker group of theirs

    def update_weights(self, global_steps: int | None = None) -> Any:
        """verl's call; see ``CheckpointEngineManager``.

        Raises:
            RuntimeError: no replica is left.
            RayTaskError: the sync failed for another reason than a replica's death.
        """
        self._drop_dead()
        while True:
            try:
                return asyncio.run(self._sync(global_steps))
            except Exception:
                if not self._drop_dead():
                    raise

    async def _sync(self, global_steps: int | None) -> dict[str, Any]:
        """verl's order of calls, without those that say nothing new: while the same replicas take part and all went
        well, their group stands, so nobody prepares, joins or finalizes. The engines wait through every such round."""
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        if self._joined != self.replicas:
            self._joined, joining = [], list(self.replicas)
            workers = [worker for replica in joining for worker in replica.workers]
            self._rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_WORKER))
            self.build_process_group(self._rollout)
        else:
            joining, self._joined = self._joined, []
        trainers = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        ray.get(trainers + self._rollout.update_weights(global_steps=global_steps))
        self._joined = joining
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return {}

    def _drop_dead(self) -> list[Any]:
        """Takes replicas that have died out of the syncs and out of the routing of requests; returns them."""
        dead = [replica for replica in self.replicas if not alive(replica)]
        if not dead:
            return []
        names = ", ".join(str(replica.replica_rank) for replica in dead)
        self.remove_replicas(dead)
        ray.get(self._servers.global_load_balancer.remove_servers.remote([each.server_address for each in dead]))
        for replica in dead:  # whoever still waits for an answer of it hears that none will come
            for actor in (*replica.servers, *replica.workers):
                ray.kill(actor)
        if not self.replicas:
            raise RuntimeError(f"every replica of the separate rollout has died; the last: {names}. Restart the run.")
        say(f"driver: replica {names} of the separate rollout has died; {len(self.replicas)} go on without it")
        return dead


def alive(replica: Any) -> bool:
    """Whether no process of a replica is known to be dead: verl's workers, its servers, and SGLang's own."""
    workers = [worker.__ray_ready__.remote() for worker in replica.workers]
    servers = [server.engine_alive.remote() for server in replica.servers]
    answered, _ = ray.wait([*workers, *servers], num_returns=len(workers) + len(servers), timeout=ANSWER_SECONDS)
    try:
        return all(ray.get(reference) is not False for reference in answered)
    except RayActorError:
        return False


def outliving(trainer: Any) -> None:
    """Gives a trainer of verl's this manager for its separate rollout, if it has one beside its own."""
    manager = getattr(trainer, "standalone_checkpoint_manager", None)
    if manager is not None:
        trainer.standalone_checkpoint_manager = OutlivingManager(manager, trainer.standalone_server_manager)
