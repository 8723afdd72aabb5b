# SPDX-License-Identifier: Apache-2.0
"""Syncs of trainers and rollouts that share no GPU: verl's checkpoint engine ``sync_plugin``, and its driver's manager.

verl makes a checkpoint engine in every actor worker and in every process that it puts next to an engine rank
(``CheckpointEngineWorker``), and calls them in this order: ``prepare`` in all, ``build_topology`` in the driver,
``init_process_group`` in all, ``send_weights`` here and ``receive_weights`` there, ``finalize`` in all.
``OutlivingManager`` leaves out what says nothing new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.device import get_torch_device, set_expandable_segments

from verl_sync_plugin.config.settings import ROLLOUT, SEPARATE_BACKEND, SyncConfig
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.report import say_who_moves, trainer_metrics, write_report
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.membership import Member, Membership, topology
from verl_sync_plugin.trainers.base import ShardStream, export_shards, refuse_plain_stream, trainer_device

# Every process of verl's imports this module with verl's registry; the rest is imported by those that sync
if TYPE_CHECKING:
    from verl_sync_plugin.sync.separate import SeparateTrainer


@CheckpointEngineRegistry.register(SEPARATE_BACKEND)
class SyncCheckpointEngine(CheckpointEngine):
    """One process's end of all syncs of a run. ``bucket_size``: that of the user, in bytes; ``is_master``:
    this is trainer rank 0, ``None`` on a rollout rank; ``sync``, ``dtype`` and ``rollout`` are ``custom.sync``,
    ``rollout.dtype`` and ``rollout.name``, which the driver writes into ``engine_kwargs``."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        sync: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        *,
        rollout: str,
    ) -> None:
        self._config = SyncConfig.from_mapping(sync)
        self._bucket_bytes = bucket_size
        self._dtype, self._rollout = dtype, rollout
        self._trainer = is_master is not None
        self._first = bool(is_master)
        self._manager: SeparateTrainer | None = None
        if self._trainer:
            export_shards(True)
        else:
            set_expandable_segments(False)  # other processes cannot open such memory

    @cached_property
    def _membership(self) -> Membership:
        return Membership(trainer_device(), self._trainer, self._first, self._config.timeout_seconds)

    def prepare(self, **more: Any) -> Member:
        say_unused("prepare", more)
        return self._membership.describe()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member], **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        say_unused("build_topology", more)
        return topology(actor_wg_world_size, rollout_world_size, metadata)

    def init_process_group(self, rank: int, members: tuple[Member, ...], **more: Any) -> None:
        """Collective: makes the group again where somebody has come, gone or been lost."""
        say_unused("init_process_group", more)
        if self._membership.join(rank, members):
            say(f"separate sync: rank {rank} of {len(members)}, {members[rank]}")

    def finalize(self, **more: Any) -> None:
        """Nothing: group and slots are kept for the next sync."""

    async def send_weights(self, weights: Any, global_steps: int | None = None, **more: Any) -> dict[str, float]:
        """One sync of a trainer rank. Collective over trainer and rollout ranks. Returns on trainer rank 0 its cost as
        metrics for verl's trainer; where that is the plugin's, the rollout's count (``hooks/trainer.py``)."""
        from verl_sync_plugin.hooks.worker import sending
        from verl_sync_plugin.sync.separate import manager_of

        say_unused("send_weights", more)
        assert self._membership.ranks is not None, "init_process_group() comes first"
        # Here and not in our worker, since one_step_off and fully_async make verl's own
        with ExitStack() as later, self._membership.taking_part(self._membership.ranks):
            # Hazard: a failed sync may leave NCCL hanging on the stream, where offloading would wait for it without a
            # bound. So `sending` ends last, when that is aborted.
            if not isinstance(weights, ShardStream):
                refuse_plain_stream()
            later.enter_context(sending(weights.engine))
            if weights.engine.is_param_offload_enabled:
                # Hazard: verl's copies to the host are asynchronous. What is read there before they end is of the step
                # before, and no hash shows it, since both sides would hash the same bytes.
                get_torch_device().synchronize()
            make = partial(self._make_manager, weights)
            manager = self._manager = manager_of(self._membership.ranks, self._manager, make)
            await manager.update_weights([], global_steps)
            await manager.finish([])
        if not self._first:
            return {}
        say_who_moves(manager.report)
        write_report(manager.report)
        return trainer_metrics(manager.report.as_dict())

    def _make_manager(self, weights: ShardStream) -> SeparateTrainer:
        from verl_sync_plugin.sync.endpoint import RolloutEndpoint
        from verl_sync_plugin.sync.manager import ShardingManager
        from verl_sync_plugin.sync.separate import SeparateTrainer

        assert self._membership.ranks is not None, "joined"
        manager = get_sharding_manager(weights.trainer, self._rollout)
        if manager.backend is None or manager.open_source is not ShardingManager.open_source:
            why = "has no backend, or an open_source of its own, which separate rollouts do not call"
            raise ValueError(f"{manager.__qualname__} {why}. Name a TrainerBackend, and override its open_source.")
        nobody = RolloutEndpoint(rollout_of(self._rollout), None)
        return SeparateTrainer(
            manager.backend, self._membership.ranks, self._membership.own, weights.engine, nobody, self._config,
            self._bucket_bytes, trainer_device(), self._dtype,
        )  # fmt: skip

    def receive_weights(self, global_steps: int | None = None, **more: Any) -> Membership:
        """verl passes the result, unread, to our rollout adapter in place of a weight stream."""
        say_unused("receive_weights", more)
        return self._membership


_WORKER = ray.remote(CheckpointEngineWorker)
# The death of a process is known at once, that of a host after Ray's health checks. One that is busy may take longer to
# answer, and is not dead.
ANSWER_SECONDS = 20.0


class OutlivingManager(CheckpointEngineManager):
    """Takes the place of verl's ``manager``; a replica that dies costs the sync under way, which is run again without
    it. ``servers``: verl's manager of the separate rollout's servers, which routes requests to them."""

    def __init__(self, manager: CheckpointEngineManager, servers: Any) -> None:
        self.__dict__.update(vars(manager))
        self._servers = servers
        self._joined: list[Any] = []  # whose group stands, since their last sync went well
        self._rollout: Any = None  # verl's worker group of theirs

    def update_weights(self, global_steps: int | None = None, **more: Any) -> Any:
        """Runs one sync, and again without replicas that have died; any other failure is raised."""
        if not self.replicas:
            raise ValueError(f"the separate rollout has no engine. Set {ROLLOUT}.nnodes and n_gpus_per_node.")
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
        goes well, the group stands and has its memory, so nobody joins or finalizes, no KV cache is released, and the
        servers pause for their loads themselves (``rollouts/sglang/server.py``)."""
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
    """Finds replicas of which a process is dead: one of verl's workers, a server, or one of SGLang's own."""
    asked = {worker.__ray_ready__.remote(): replica for replica in replicas for worker in replica.workers}
    asked |= {server.engine_alive.remote(): replica for replica in replicas for server in replica.servers}
    heard, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    dead = [asked[answer] for answer in heard if _says_dead(answer)]
    return [replica for replica in replicas if replica in dead]


def _says_dead(answer: ray.ObjectRef) -> bool:
    try:
        return ray.get(answer) is False
    except ActorDiedError:
        return True
    except ActorUnavailableError:  # no connection at the moment
        return False
