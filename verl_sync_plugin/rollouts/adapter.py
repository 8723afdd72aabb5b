# SPDX-License-Identifier: Apache-2.0
"""verl's calls of a sync in the actor workers become the sharding manager's phase; of no engine.

The worker calls ``resume(["weights"])``, ``update_weights(stream)``, makes room and calls ``resume(["kv_cache"])``. The
first resume is put off into ``update_weights``, where a failure can be agreed on by all ranks; nothing needs the
weights earlier. verl's own worker makes these three calls alone. Ours (``hooks/worker.py``) calls
``make_room_for_weights`` first, and ``make_room_for_rest`` and ``end_sync`` in place of the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import ray
import torch
from ray.exceptions import RayActorError
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_torch_device

from verl_sync_plugin.config.settings import (
    BUCKET,
    ROLLOUT,
    SEPARATE_BACKEND,
    SHARES_GPU,
    bucket_of,
    section,
    sync_config_of,
)
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.log import say, say_unused
from verl_sync_plugin.report import SyncReport, say_who_moves
from verl_sync_plugin.rollouts import Rollout
from verl_sync_plugin.rollouts.gate import KV_CACHE, WEIGHTS
from verl_sync_plugin.room import (
    KV_RESUME,
    WEIGHTS_RESUME,
    Room,
    growth,
    note_device_memory,
    read_device,
    release_cache,
)
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.endpoint import Call, RolloutEndpoint, call_under_way
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.membership import Membership
from verl_sync_plugin.sync.separate import SeparateRollout, manager_of
from verl_sync_plugin.trainers.base import ShardStream, export_shards, refuse_plain_stream, trainer_device
from verl_sync_plugin.transport.agreement import Ranks
from verl_sync_plugin.transport.joint import JointRanks


class SyncAdapter:
    """Mixed into verl's rollout adapter of one engine. Constructing it gives verl's own adapter with
    ``custom.sync.enabled=False``, and for an engine that the plugin never syncs: a reward model's, a teacher's, or one
    that gets its weights from verl's checkpoint engines."""

    stock: ClassVar[type]  # verl's own adapter
    rollout: ClassVar[Rollout]
    config: Any
    model_config: Any
    device_mesh: DeviceMesh

    def __new__(
        cls, config: Any, model_config: Any, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        backend = config.checkpoint_engine.backend
        # Only the actor's workers, which train, have a mesh; all others are verl's ``CheckpointEngineWorker``
        synced = device_mesh is not None or backend == SEPARATE_BACKEND
        enabled = synced and sync_config_of(config).enabled
        export_shards(enabled)
        if enabled:
            return super().__new__(cls)
        if synced:
            say("custom.sync.enabled=False: stock verl moves the weights")
        elif backend != "naive":
            say("separate rollout: verl's checkpoint engine and stock loading move the weights")
        return cls.stock(config, model_config, device_mesh, *args, **kwargs)

    def __init__(
        self, config: Any, model_config: Any, device_mesh: DeviceMesh | None, replica_rank: int = -1, **more: Any
    ) -> None:
        self.rollout.refuse_keys(config)
        stock: Any = super().__init__
        stock(config, model_config, device_mesh, replica_rank, **more)
        self._separate = None if device_mesh is not None else SeparateReceiver(self._make_separate)
        self.makes_room = self._separate is None  # our worker may, around the syncs of this rollout
        self._sync = sync_config_of(config)
        self._manager: ShardingManager | None = None
        # With resident weights verl makes no first-stage call; False of a config without our keys is verl's default
        two_stages = config.multi_stage_wake_up or not hasattr(config, BUCKET) or self.serves_adapter
        self._stages = ([WEIGHTS], [KV_CACHE]) if two_stages else ([WEIGHTS, KV_CACHE], [])
        self._wake_tags: list[str] = []
        always = bool(section(config, "custom", f"{ROLLOUT}.custom").get(SHARES_GPU, False))
        self._room = Room(lambda: read_device(trainer_device()), always)
        self._room_error: Exception | None = None  # kept for ``update_weights``
        self._around = SyncReport()  # what precedes the manager's report of the sync under way

    @property
    def serves_adapter(self) -> bool:
        """True if the engine serves the trainer's adapter itself, so that its base weights stay resident."""
        raise NotImplementedError

    @property
    def leads(self) -> bool:
        """True if this rank speaks for its engine's server."""
        return bool(self.device_mesh["infer_tp"].get_local_rank() == 0)

    def find_server(self) -> Any:
        """The handle of the engine's server actor."""
        raise NotImplementedError

    async def resume(self, tags: list[str], **more: Any) -> None:
        """verl's stage calls: ``["weights"]`` is noted, ``["kv_cache"]`` ends the sync."""
        say_unused("resume", more)
        if WEIGHTS in tags:
            self._wake_tags = list(self._stages[0])
        elif self._manager is not None:
            await self._finish(self._stages[1])

    async def release(self, **more: Any) -> None:
        """Puts the engine to sleep; harmless when it sleeps already."""
        say_unused("release", more)
        if self.config.free_cache_engine and self.leads:
            await self.find_server().release_tags.remote([KV_CACHE] if self.serves_adapter else [KV_CACHE, WEIGHTS])

    async def update_weights(self, weights: Any, global_steps: int | None = None, ends: bool = True, **_: Any) -> None:
        """Moves the trainer's weights into the engine. Collective over all trainer ranks. Raises SyncError where any
        rank failed; the same text on every rank. ``weights``: the ``ShardStream`` of the plugin's engine, or the group
        of a separate rollout; ``ends``: verl makes no further call for this sync (no ``free_cache_engine``)."""
        if self._separate is not None:
            await self._separate.receive(weights, global_steps)
            return
        if not isinstance(weights, ShardStream):
            refuse_plain_stream()
        if self._manager is None:
            with self._around.stage("update_weights"), self._around.stage("open"):
                self._manager = self._make_manager(weights)
            if ends and self.config.free_cache_engine:
                say("the trainer runs verl's own worker, which empties caches at both ends of every sync")
        error, self._room_error = self._room_error, None
        with self._manager.agreement.attempt():
            if error is not None:
                raise error
        await self._manager.update_weights(self._wake_tags, global_steps)
        self._wake_tags = []
        if ends and not self.config.free_cache_engine:
            await self._finish([])

    def make_room_for_weights(self, offloaded: bool) -> None:
        """Hands back what the engine needs of the trainer's cache to resume its weights. An error is kept for
        ``update_weights``, where all ranks hear of it. Parameters that are ``offloaded`` are waited for: verl's copies
        to the host may still run."""
        self._around = SyncReport()
        try:
            with self._around.stage("before"):
                if offloaded:
                    get_torch_device().synchronize()
                staging = self._manager.staging_to_come if self._manager is not None else 0
                release = partial(release_cache, trainer_device())
                self._around.note_release(self._room.make_room(WEIGHTS_RESUME, release, staging))
        except Exception as error:
            self._room_error = error

    async def make_room_for_rest(self, offload: Callable[[], None]) -> None:
        """After ``update_weights``: makes the room that stage 2 needs, on all ranks. Collective. The parameters stay
        where they are until here: engine ranks may read them there until the commit."""
        manager = self._manager
        assert manager is not None, "update_weights comes first"
        agreement, report = manager.agreement, manager.report
        report.put_before(self._around)
        with agreement.attempt(), report.stage("offload"):
            offload()
        released = None
        with agreement.attempt(), report.stage("after"):
            self._room.note_activations(report.activation_bytes)
            released = self._room.make_room(KV_RESUME, partial(release_cache, trainer_device()))
            report.note_release(released)
        try:
            with report.stage("barrier"):  # a leader must not wake an engine whose other ranks have no room yet
                short = agreement.settle("making room for the engine", waiting=released is not None)
        except (SyncError, asyncio.CancelledError) as error:
            await manager.endpoint.abandon(str(error) or repr(error))
            raise
        # Where the cache has to go, staging memory goes, too: at the end of the next sync, before the room is made
        manager.keeps_staging = not (short and self.config.free_cache_engine)

    async def end_sync(self) -> None:
        """Stage 2."""
        await self._finish(self._stages[1] if self.config.free_cache_engine else [])

    async def _finish(self, tags: list[str]) -> None:
        manager = self._manager
        assert manager is not None
        with manager.agreement.attempt():
            note_device_memory(manager.report, trainer_device(), KV_RESUME[0])
        report = await manager.finish(tags)
        if self._room.learning:
            grown = growth(report.device_used_bytes)
            if not tags:  # what changed then is none of the engine's needs
                grown.pop(KV_RESUME, None)
            self._room.learn(manager.agreement.gather("what the engine resumed", grown))
        if manager.agreement.ranks.rank == 0:
            say_who_moves(report)
        await manager.endpoint.publish(report)  # no rank waits for another any more

    def _make_manager(self, stream: ShardStream) -> ShardingManager:
        """This rank's sharding manager. Collective over all trainer ranks."""
        config, rank, ranks = self.config, torch.distributed.get_rank(), self.device_mesh["infer_tp"].mesh.tolist()
        device, resumes_later = trainer_device(), bool(config.free_cache_engine and self._stages[1])
        endpoint = self._make_endpoint(self.leads, tuple(ranks), Ranks.after_loss, resumes_later)
        manager_class, megabytes = get_sharding_manager(stream.trainer, str(config.name)), bucket_of(config)
        say(f"actor rank {rank}: sharding manager {manager_class.__name__}, buckets of {megabytes} MiB")
        manager = manager_class(stream.engine, endpoint, self._sync, megabytes << 20, device, str(config.dtype))
        manager.keeps_staging = not config.free_cache_engine  # until it is known what the engine resumes
        return manager

    def _make_separate(self, joint: JointRanks, ranks: tuple[int, ...]) -> SeparateRollout:
        """Collective over trainer and rollout ranks."""
        place = ranks.index(joint.rank)
        # A server whose driver has released its KV cache flushes when that is back, whatever it is asked
        endpoint = self._make_endpoint(place == 0, ranks, joint.after_loss)
        say(f"rollout rank {joint.rank}: engine rank {place} of {len(ranks)}, separate from the trainer")
        return SeparateRollout(joint, endpoint, self._sync, trainer_device())

    def _make_endpoint(
        self, leads: bool, ranks: tuple[int, ...], after_death: str, resumes_later: bool = False
    ) -> RolloutEndpoint:
        """Refuses the engine's model, too, of which the driver may have had no checkpoint."""
        self.rollout.refuse_family(str(self.model_config.path), self.model_config.hf_config.to_dict(), self.config)
        server = self.find_server()  # on every rank: if there is none, nobody waits for the others
        calls, real_weights = calls_of(server, after_death), not str(self.config.load_format).startswith("dummy")
        given = self.rollout, calls if leads else None, ranks, real_weights, self._sync.timeout_seconds
        return RolloutEndpoint(*given, awake_after_load=not resumes_later)


class SeparateReceiver:
    """The rollout adapter's part in the syncs of a separate rollout. ``make`` makes the manager of all ranks and those
    next to this one's engine, again whenever they have changed."""

    def __init__(self, make: Callable[[JointRanks, tuple[int, ...]], SeparateRollout]) -> None:
        self._make = make
        self._manager: SeparateRollout | None = None
        self._one = asyncio.Lock()

    async def receive(self, membership: Membership, global_steps: int | None) -> None:
        """One sync. Collective over trainer and rollout ranks. ``membership``: of this process's checkpoint engine."""
        ranks = membership.ranks
        assert ranks is not None, "joined"
        async with self._one:  # a sync that has failed ends before the next one begins
            with membership.taking_part(ranks):
                if membership.ranks is not ranks:
                    raise RuntimeError("a later sync has begun, in another group")
                make = partial(self._make, ranks, membership.engine_ranks)
                manager = self._manager = manager_of(ranks, self._manager, make)
                await manager.update_weights([], global_steps)
                await manager.finish([])
            await manager.endpoint.publish(manager.report)


def calls_of(server: Any, after_death: str) -> Call:
    """Calls of a server actor, by its handle; ``after_death`` ends the error of a server that has died."""

    def call(method: str, *arguments: Any) -> Future[Any]:
        answer = call_under_way()

        def pass_on(done: Future[Any]) -> None:
            try:
                answer.set_result(done.result())
            except RayActorError as error:
                said = str(error).strip().splitlines()[0]
                died = f"the rollout server died, and its engine with it ({said}); {after_death}"
                answer.set_exception(RuntimeError(died))
            except BaseException as error:
                answer.set_exception(error)

        reference: ray.ObjectRef = getattr(server, method).remote(*arguments)
        reference.future().add_done_callback(pass_on)
        return answer

    return call
