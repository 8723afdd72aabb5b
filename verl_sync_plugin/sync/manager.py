# SPDX-License-Identifier: Apache-2.0
"""The resharding phase of one trainer rank, whatever the trainer and the rollout engine are: ``ShardingManager``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from verl.utils.ulysses import BaseShardingManager

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.log import say
from verl_sync_plugin.memory import PeakMemory, no_collection, note_device_memory
from verl_sync_plugin.report import SyncReport, progress
from verl_sync_plugin.sync.commit import Commit
from verl_sync_plugin.sync.connect import MeetingPoint
from verl_sync_plugin.sync.endpoint import RolloutEndpoint, abandon
from verl_sync_plugin.sync.planning import Planning
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.wake import Waking
from verl_sync_plugin.sync.ways import PeersUnreachableError, Sync, Way, Ways
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.transport.agreement import Agreement


class OtherDtypesError(Exception):
    """A sync is planned once more, with other dtypes."""


class ShardingManager(BaseShardingManager):
    """Moves the weights of one trainer into one rollout engine; one instance per trainer rank and run.

    A pair of trainer and rollout is a subclass that names its ``backend`` and is registered
    (``register_sharding_manager``); one may also override ``open_source`` alone. Construction is collective over all
    trainer ranks.

    Args:
        engine: verl's training engine.
        endpoint: the rollout engine beside this rank.
        config: the sync's settings.
        bucket_bytes: bound on what a rank stages of one bucket.
        device: where the trainer computes.
        rollout_dtype: ``rollout.dtype``.

    Attributes:
        report: of the last sync, or the one under way.
        keeps_staging: staging memory stays allocated between syncs; the same on all ranks. Who lets the engine sleep
            says False where the room for it is short.
        asks_early: an engine that is awake is asked to load before the ranks plan, and comes while they do; it
            generates nothing from then on.
    """

    backend: ClassVar[type[TrainerBackend]]
    asks_early: ClassVar[bool] = True

    def __init__(
        self,
        engine: Any,
        endpoint: RolloutEndpoint,
        config: SyncConfig,
        bucket_bytes: int,
        device: torch.device,
        rollout_dtype: str = "bfloat16",
    ) -> None:
        super().__init__()
        self.engine = engine
        self.endpoint = endpoint
        self.config = config
        self._device = device
        if hasattr(self, "backend"):
            self.trainer = self.backend(engine, config, device, rollout_dtype)
        self.source: ParameterSource | None = None
        self.agreement = self._agree()
        self.sender = BucketSender(device, config.timeout_seconds)
        self.planning = Planning()
        self.waking = Waking(self.agreement, endpoint, device)
        self.meeting = MeetingPoint(self.agreement, endpoint, self.sender, config)
        self.ways = self._make_ways()
        self.commit = Commit(config, self.agreement, self.sender, self.ways, endpoint)
        self.report = SyncReport()
        self.keeps_staging = True
        self._bucket_bytes = bucket_bytes
        self._syncs = 0

    def _agree(self) -> Agreement:
        """Where the ranks settle; collective."""
        return Agreement(self.config.timeout_seconds)

    def _make_ways(self) -> Ways:
        """Collective."""
        return Ways(self.config, self.agreement, self.sender, self._device)

    def open_source(self) -> ParameterSource:
        """The parameter source of the trainer; called at the first sync, and again if the engine asks for other dtypes.

        Raises:
            ValueError: the trainer is configured in a way this manager cannot sync; names key, value and remedy.
            TypeError: a registered class names no ``backend`` and does not override this.
        """
        if not hasattr(self, "backend"):
            raise TypeError(f"{type(self).__qualname__}: name a backend (a TrainerBackend), or override open_source")
        return self.trainer.open_source()

    @property
    def staging_to_come(self) -> int:
        """Bytes of staging memory that the next sync will allocate, as far as the last one tells."""
        return max(self.report.staging_bytes - self.sender.staging_bytes, 0)

    async def update_weights(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """Runs one sync. Collective over all trainer ranks.

        Args:
            wake_tags: memory tags the engine needs for loading; empty when it is awake.
            global_steps: verl's weight version.

        Raises:
            SyncError: any rank or engine failed; the same text on every rank. Trainer weights are as before, the
                engine's may be half written, so that it generates nothing until a sync succeeds. The next call starts
                afresh.
        """
        try:
            return await self.move(wake_tags, global_steps)
        except BaseException as error:
            self.agreement.forget()
            await self.meeting.give_up(str(error) or repr(error))
            raise

    async def move(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """What ``update_weights`` does; a failure is not yet told to the engine."""
        sync_id, version = self.name_sync(global_steps), None if global_steps is None else str(global_steps)
        self.report = self.new_report(global_steps)
        memory = PeakMemory(self._device)
        with no_collection(), progress(self.report, speaks=self.agreement.ranks.rank == 0):
            with self.agreement.attempt():
                memory.begin()
            while await self._to_be_repeated(sync_id, version, wake_tags):
                sync_id, wake_tags = f"{sync_id} once more", []  # in another way; the engine is awake by now
            with self.agreement.attempt():  # the ranks settle once more in `finish`
                memory.into(self.report)
                self.report.kept_staging_bytes = self.sender.staging_bytes
                note_device_memory(self.report, self._device, "synced")
        return self.report

    def name_sync(self, global_steps: int | None) -> str:
        """What the next sync is called between trainer and engine ranks; no other sync of an engine is called so."""
        self._syncs += 1
        return f"{self._syncs} (step {global_steps})"

    def new_report(self, global_steps: int | None) -> SyncReport:
        """The report of a sync that begins now."""
        return SyncReport.begun(global_steps, type(self).__name__, self.agreement.ranks.rank)

    async def _to_be_repeated(self, sync_id: str, version: str | None, wake_tags: list[str]) -> bool:
        """Whether the delivery that was chosen could not be used, or the engine takes more of some tensors than was
        planned; both are known before anything is loaded."""
        try:
            await self._sync(sync_id, version, wake_tags)
        except PeersUnreachableError as error:
            await self.meeting.leave()
            self.ways.fall_back(error)
            return True
        except OtherDtypesError:
            if hasattr(self, "trainer"):
                self.source = None  # opened again, it says other dtypes; first of all, for a wait can be cancelled
            await self.meeting.leave()
            self.sender.unstage()  # a reader opens an export once: the next plan has another
            return True
        return False

    async def _sync(self, sync_id: str, version: str | None, wake_tags: list[str]) -> None:
        """One sync in the order in which it happens; all ranks agree at the end of each of its steps, and per bucket.

        plan, wake, connect, transfer, commit; ``finish`` comes later, when the trainer has made room.
        """
        stage, early = self.report.stage, self.asks_early and not wake_tags
        self.meeting.begin(sync_id)
        try:
            with stage("update_weights"):
                if early:
                    self.meeting.ask(version)
                with stage("plan"):
                    sync, way = self.plan(sync_id)
                    self.report.delivery = way.name
            await self.waking.resume(wake_tags, self.report, meanwhile=partial(way.fill, sync))
            self.report.staging_bytes = self.sender.staging_bytes
            with stage("update_weights"):
                if not early:
                    self.meeting.ask(version)
                with stage("connect"):
                    questions = self.commit.questions(sync, way)
                    greeting = await self.meeting.meet(partial(way.greet, sync, questions))
                    if wake_tags:
                        with self.agreement.attempt():
                            note_device_memory(self.report, self._device, "weights")
                    way.greeted()
                    layers = self.trainer.layers if hasattr(self, "trainer") else 0
                    self._learn(self.commit.opened(sync.plan, greeting.map, questions, layers))
                way.run(sync)  # the transfer
                with stage("commit"):
                    await self.commit.run(sync, way, self.meeting.pending)
        finally:
            self._let_go()

    def _learn(self, kept: Mapping[str, str]) -> None:
        """Collective where there are any, which all ranks have heard of.

        Args:
            kept: ``load_map.wire_dtypes``.

        Raises:
            OtherDtypesError: some tensors travel in another dtype now; on all ranks.
        """
        policy = self.trainer.policy if hasattr(self, "trainer") else None
        if kept and self.agreement.any("learning dtypes", lambda: policy is not None and policy.learn(kept)):
            if self.agreement.ranks.rank == 0:
                say("some tensors travel in the dtype in which the engine keeps them; the sync is planned once more")
            raise OtherDtypesError

    def _let_go(self) -> None:
        """Hangs up, and drops every reference to the trainer's parameters."""
        self.sender.hang_up()
        if self.source is not None:
            self.source.release()

    def plan(self, sync_id: str) -> tuple[Sync, Way]:
        """Collective: what every rank holds, the buckets in which it travels, and the way; in one round as long as
        nothing has changed."""
        agreement, reach = self.agreement, self.ways.reach
        if self.source is None:
            self.source = agreement.step("opening the trainer", self.open_source)
        source = self.source = self.source.agree_on_layout(agreement) or self.source
        shards: list[Shard] = []
        if reach.possible is None:
            shards = agreement.step("reading the shards", source.shards)  # it knows its group from then on
            reach.decide(source.group)
        sync: Sync | None = None
        votes = [0] * 5
        with agreement.attempt():
            if not agreement.failed:
                shards = shards or source.shards()
                plan = self.planning.make(source, shards, self._bucket_bytes, bool(reach.possible))
                group = source.group
                beside = (agreement.ranks.rank,) if group is None else tuple(dist.get_process_group_ranks(group))
                sync = self._sync_of(sync_id, plan, beside, beside, self.commit.due(plan), shards)
                votes = [int(self.planning.changed), *self.ways.votes(sync)]
        changed, *votes = agreement.vote("planning the sync", votes).tolist()
        assert sync is not None, "no rank has failed"
        if changed:
            self.planning.compare(agreement)
        return sync, self.ways.take(sync, votes)

    def _sync_of(
        self, sync_id: str, plan: Plan, senders: tuple[int, ...], readers: tuple[int, ...], verified: bool,
        shards: list[Shard],
    ) -> Sync:  # fmt: skip
        report, source = self.report, self.source
        assert source is not None, "opened"
        report.bucket_bytes = self._bucket_bytes or plan.slot_bytes
        report.nbytes, report.buckets, report.tensors = plan.nbytes, len(plan.buckets), plan.tensor_count
        return Sync(sync_id, plan, source, shards, report, senders, readers, verified, self.keeps_staging)

    async def finish(self, tags: list[str]) -> SyncReport:
        """Awake, stage 2, after the trainer has made room on all ranks: resume ``tags``, flush once.

        Raises:
            SyncError: any engine failed; the same text on every rank. It generates nothing until a sync succeeds.
        """
        try:
            await self.waking.finish(tags, self.report)
        except BaseException as error:
            self.agreement.forget()
            await abandon(self.endpoint, str(error) or repr(error))
            raise
        return self.report

    async def publish(self) -> None:
        """After all else: the leader leaves the report where verl's trainer fetches it."""
        await self.waking.publish(self.report)
