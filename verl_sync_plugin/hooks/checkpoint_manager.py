# SPDX-License-Identifier: Apache-2.0
"""verl's driver of the syncs of separate rollouts: it goes on without replicas that die, in few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from verl_sync_plugin.config.settings import PREFIX
from verl_sync_plugin.log import say, say_unused

_WORKER = ray.remote(CheckpointEngineWorker)
# The death of a process is known at once, that of a host after Ray's health checks. One that is busy may take longer to
# answer, and is not dead.
ANSWER_SECONDS = 20.0


class OutlivingManager(CheckpointEngineManager):
    """verl's manager; a replica that dies costs the sync under way, which is run again without it.

    Args:
        manager: verl's own, whose place this one takes.
        servers: verl's manager of the separate rollout's servers, which routes requests to them.
    """

    def __init__(self, manager: CheckpointEngineManager, servers: Any) -> None:
        self.__dict__.update(vars(manager))
        self._servers = servers
        self._joined: list[Any] = []  # whose group stands, since their last sync went well
        self._rollout: Any = None  # verl's worker group of theirs

    def update_weights(self, global_steps: int | None = None, **more: Any) -> Any:
        """verl's call; see ``CheckpointEngineManager``.

        Raises:
            ValueError: there never was a replica.
            RuntimeError: no replica is left.
            RayTaskError: the sync failed for another reason than a replica's death.
        """
        if not self.replicas:
            raise ValueError(
                f"the separate rollout has no engine. Set {PREFIX}.nnodes and n_gpus_per_node to its GPUs."
            )
        say_unused("update_weights", more)
        self._drop_dead()
        while True:
            try:
                return asyncio.run(self._sync(global_steps))
            except Exception:
                if not self._drop_dead():
                    raise

    async def _sync(self, global_steps: int | None) -> dict[str, Any]:
        """The first sync of a group of replicas in verl's order of calls. While the same replicas take part and all
        goes well, the group stands, so nobody prepares, joins or finalizes; it has the memory that it needs, so no KV
        cache is released; and the servers pause for their loads themselves (``rollouts/sglang/pause.py``)."""
        stands, self._joined = self._joined == self.replicas, []
        joining = list(self.replicas)
        if not stands:
            await self.abort_replicas()
            await self.release_kv_cache_replicas()
            workers = [worker for replica in joining for worker in replica.workers]
            self._rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_WORKER))
            self.build_process_group(self._rollout)
        trainers = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        ray.get(trainers + self._rollout.update_weights(global_steps=global_steps))
        if not stands:
            await self.resume_kv_cache_replicas()
            await self.resume_generation_replicas()
        self._joined = joining
        return {}

    def _drop_dead(self) -> list[Any]:
        """Takes replicas that have died out of the syncs and out of the routing of requests; returns them."""
        dead = dead_among(self.replicas)
        if not dead:
            return []
        names = ", ".join(str(replica.replica_rank) for replica in dead)
        self.remove_replicas(dead)
        servers = self._servers  # verl goes through these lists for profiles and metrics
        servers.rollout_replicas = [each for each in servers.rollout_replicas if each not in dead]
        servers.server_handles = [each._server_handle for each in servers.rollout_replicas]
        servers.server_addresses = [each.server_address for each in servers.rollout_replicas]
        ray.get(servers.global_load_balancer.remove_servers.remote([each.server_address for each in dead]))
        for replica in dead:  # whoever still waits for an answer of it hears that none will come
            for actor in (*replica.servers, *replica.workers):
                ray.kill(actor)
        if not self.replicas:
            raise RuntimeError(f"every replica of the separate rollout has died; the last: {names}. Restart the run.")
        say(f"driver: replica {names} of the separate rollout has died; {len(self.replicas)} go on without it")
        return dead


def dead_among(replicas: Sequence[Any]) -> list[Any]:
    """The replicas of which a process is known to be dead: one of verl's workers, a server, or one of SGLang's own."""
    asked = {
        replica: [
            *(worker.__ray_ready__.remote() for worker in replica.workers),
            *(server.engine_alive.remote() for server in replica.servers),
        ]
        for replica in replicas
    }
    everything = [reference for references in asked.values() for reference in references]
    if not everything:
        return []
    answered, _ = ray.wait(everything, num_returns=len(everything), timeout=ANSWER_SECONDS)
    heard = set(answered)
    return [replica for replica, references in asked.items() if any(_says_dead(r) for r in references if r in heard)]


def _says_dead(answer: ray.ObjectRef) -> bool:
    try:
        return ray.get(answer) is False
    except ActorDiedError:
        return True
    except ActorUnavailableError:  # no connection at the moment
        return False


def outliving(trainer: Any) -> None:
    """Gives a trainer of verl's this manager for its separate rollout, if it has one beside its own."""
    manager = getattr(trainer, "standalone_checkpoint_manager", None)
    if manager is not None:
        trainer.standalone_checkpoint_manager = OutlivingManager(manager, trainer.standalone_server_manager)
