# SPDX-License-Identifier: Apache-2.0
"""The rollout adapter in every actor worker: verl's three calls of a sync become the sharding manager's phase.

The worker calls ``resume(["weights"])``, ``update_weights(stream)``, makes room and calls ``resume(["kv_cache"])``. The
first resume is put off into ``update_weights``, where a failure can be agreed on by all ranks; nothing needs the
weights earlier. verl's own worker knows these three calls alone, ours (``hooks/worker.py``) also those that make room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_torch_device
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.workers.rollout.sglang_rollout.utils import lora_served_as_adapter

from verl_sync_plugin.config.settings import PREFIX, SEPARATE_BACKEND, SHARES_GPU, section, sync_config_of
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.memory import FIRST, REST, Room, growth, note_device_memory, read_device, release_cache
from verl_sync_plugin.report import SyncReport, say_who_moves, write_report
from verl_sync_plugin.rollouts.sglang.arguments import refuse_keys
from verl_sync_plugin.rollouts.sglang.awake import WEIGHTS, awake_behind_load, sleep_tags, wake_stages
from verl_sync_plugin.rollouts.sglang.limits import generating_bytes
from verl_sync_plugin.rollouts.sglang.making import make_manager, make_separate
from verl_sync_plugin.rollouts.sglang.separate import SeparateReceiver
from verl_sync_plugin.sync.endpoint import abandon
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.separate.handles import Incoming
from verl_sync_plugin.sync.separate.managers import SeparateRollout
from verl_sync_plugin.trainers import shard_stream
from verl_sync_plugin.trainers.base import trainer_device
from verl_sync_plugin.trainers.shard_stream import ShardStream, refuse_plain_stream


class SyncServerAdapter(ServerAdapter):
    """verl's SGLang adapter with the plugin's resharding phase.

    Constructing it gives verl's own ``ServerAdapter`` with ``custom.sync.enabled=False``, and for an engine that the
    plugin never syncs: a reward model's, a teacher's, or one that gets its weights from verl's checkpoint engines.
    """

    def __new__(
        cls, config: Any, model_config: Any, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        backend = config.checkpoint_engine.backend
        # Only the actor's workers, which train, have a mesh; all others are verl's ``CheckpointEngineWorker``
        synced = device_mesh is not None or backend == SEPARATE_BACKEND
        enabled = synced and sync_config_of(config).enabled
        shard_stream.take_over(enabled)
        if enabled:
            return super().__new__(cls)
        if synced:
            say("custom.sync.enabled=False: stock verl moves the weights")
        elif backend != "naive":
            say("separate rollout: verl's checkpoint engine and stock loading move the weights")
        return ServerAdapter(config, model_config, device_mesh, *args, **kwargs)

    def __init__(
        self, config: Any, model_config: Any, device_mesh: DeviceMesh | None, replica_rank: int = -1, **more: Any
    ) -> None:
        refuse_keys(config, moves=True)
        super().__init__(config, model_config, device_mesh, replica_rank, **more)
        # verl's base class fills in device_mesh later
        self._separate = None if device_mesh is not None else SeparateReceiver(self._make_separate)
        self._sync = sync_config_of(config)
        self._manager: ShardingManager | None = None
        self._keeps_weights = lora_served_as_adapter(self.model_config)
        staged = bool(config.multi_stage_wake_up) or self._keeps_weights  # without resident weights no first stage
        self._stage_one, self._stage_two = wake_stages(staged)
        self._wake_tags: list[str] = []
        always = bool(section(config, "custom", f"{PREFIX}.custom").get(SHARES_GPU, False))
        self._room = Room(lambda: read_device(trainer_device()), generating_bytes(config), always)
        self._early: Exception | None = None
        self._around = SyncReport()  # what precedes the manager's report of the sync under way

    @property
    def makes_room(self) -> bool:
        """Whether the plugin serves this rollout, and our worker may make room around its syncs."""
        return self._separate is None

    async def _init_server_adapter(self, **more: Any) -> None:
        """Finds the server actor. Replaces verl's, which builds an HTTP client that this path does not use."""
        say_unused("_init_server_adapter", more)
        if not hasattr(self, "server_actor"):
            self.server_actor = self._find_server()

    def _find_server(self) -> Any:
        return ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")

    def _make_separate(self, incoming: Incoming) -> SeparateRollout:
        return make_separate(incoming, self.config, self.model_config, self._find_server())

    async def resume(self, tags: list[str], **more: Any) -> None:
        """verl's stage calls: ``["weights"]`` is noted, ``["kv_cache"]`` ends the sync.

        Raises:
            SyncError: stage 2 failed on any rank; the same text on all.
        """
        say_unused("resume", more)
        if WEIGHTS in tags:
            self._wake_tags = list(self._stage_one)
        elif self._manager is not None:
            await self._finish(self._stage_two)

    async def release(self, **more: Any) -> None:
        """Puts the engine to sleep; harmless when it sleeps already."""
        say_unused("release", more)
        await self._init_server_adapter()
        if self.config.free_cache_engine and self._is_server_tp_leader():
            await self.server_actor.release_tags.remote(sleep_tags(keep_weights=self._keeps_weights))

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, ends: bool = True, **kwargs: Any
    ) -> None:
        """Moves the trainer's weights into the engine. Collective over all trainer ranks.

        Args:
            weights: the ``ShardStream`` of the plugin's engine.
            global_steps: verl's weight version.
            ends: end the sync here when verl makes no further call, that is without ``free_cache_engine``.

        Raises:
            SyncError: any rank failed; the same text on every rank.
            RegistryConflictError: the stream comes from another plugin's engine.
            ValueError: the stream comes from an engine without sharding manager.
        """
        if self._separate is not None:
            await self._separate.receive(weights, global_steps)
            return
        if not isinstance(weights, ShardStream):
            refuse_plain_stream()
        await self._init_server_adapter()
        manager, early = self._manager_for(weights, ends), self._early
        self._early = None
        with manager.agreement.attempt():
            if early is not None:
                raise early
        await manager.update_weights(self._wake_tags, global_steps)
        self._wake_tags = []
        if ends and not self.config.free_cache_engine:
            await self._finish([])

    def make_room_for_weights(self, offloaded: bool) -> None:
        """Hands back what the engine needs of the trainer's cache to resume its weights.

        An error, perhaps of the training step before, is kept for ``update_weights``, where all ranks hear of it.

        Args:
            offloaded: the parameters are in host memory; verl's copies to there may still run, and are waited for.
        """
        self._around = SyncReport()
        try:
            with self._around.stage("before"):
                if offloaded:
                    get_torch_device().synchronize()
                beside = self._manager.staging_to_come if self._manager is not None else 0
                self._around.note_release(self._room.make(FIRST, partial(release_cache, trainer_device()), beside))
        except Exception as error:
            self._early = error

    async def make_room_for_rest(self, offload: Callable[[], None]) -> None:
        """After ``update_weights``: makes the room that stage 2 needs, on all ranks. Collective.

        The parameters stay where they are until here: before the commit the sync may have to look one up again.

        Raises:
            SyncError: any rank failed; the same text on every rank.
        """
        manager = self._manager
        assert manager is not None, "update_weights comes first"
        agreement, report = manager.agreement, manager.report
        report.put_before(self._around)
        with agreement.attempt(), report.stage("offload"):
            offload()
        released: int | None = None
        with agreement.attempt(), report.stage("after"):
            self._room.note_activations(report.activation_bytes)
            released = self._room.make(REST, partial(release_cache, trainer_device()))
            self._around.note_release(released)
        report.emptied_caches, report.released_bytes = self._around.emptied_caches, self._around.released_bytes
        try:
            with report.stage("barrier"):  # a leader must not wake an engine whose other ranks have no room yet
                short = agreement.settle("making room for the engine", waiting=released is not None)
        except (SyncError, asyncio.CancelledError) as error:
            await abandon(manager.endpoint, str(error) or repr(error))
            raise
        # Where the cache has to go, staging memory goes, too: at the end of the next sync, before the room is made
        manager.keeps_staging = not (short and self.config.free_cache_engine)

    async def end_sync(self) -> None:
        """Stage 2.

        Raises:
            SyncError: it failed on any rank; the same text on all.
        """
        await self._finish(self._stage_two if self.config.free_cache_engine else [])

    def _manager_for(self, weights: ShardStream, ends: bool) -> ShardingManager:
        if self._manager is None:
            with self._around.stage("update_weights"), self._around.stage("open"):
                self._manager = self._make_manager(weights)
            if ends and self.config.free_cache_engine:
                say("the trainer runs verl's own worker, which empties caches at both ends of every sync")
        return self._manager

    def _make_manager(self, stream: ShardStream) -> ShardingManager:
        awake = awake_behind_load(self.config.free_cache_engine, self._stage_two)
        mesh = self.device_mesh["infer_tp"]
        manager = make_manager(stream, self.config, self.model_config, self.server_actor, mesh, awake)
        manager.keeps_staging = not self.config.free_cache_engine  # until it is known what the engine resumes
        return manager

    async def _finish(self, tags: list[str]) -> None:
        manager = self._manager
        assert manager is not None
        with manager.agreement.attempt():
            note_device_memory(manager.report, trainer_device(), REST[0])
        report = await manager.finish(tags)
        if self._room.learning:
            grown = growth(report.device_used_bytes)
            if not tags:  # what changed then is none of the engine's needs
                grown.pop(REST, None)
            self._room.learn(manager.agreement.gather("what the engine resumed", grown))
        await manager.publish()  # no rank waits for another any more
        if manager.agreement.ranks.rank == 0:
            say_who_moves(report)
        if manager.endpoint.leader:
            write_report(report)
