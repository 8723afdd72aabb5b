# SPDX-License-Identifier: Apache-2.0
"""The resharding phase of one trainer rank, for any trainer and any rollout engine.

``ShardingManager.update_weights`` plans, wakes the engine, connects, transfers and commits; ``finish`` wakes the rest
of the engine once the trainer has made room. A LoRA adapter is merged on the way, or follows the base by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from verl.utils.ulysses import BaseShardingManager

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.log import say
from verl_sync_plugin.report import SyncReport, progress
from verl_sync_plugin.room import measured, no_collection, note_device_memory
from verl_sync_plugin.sync.delivery import Deliveries, Delivery, DeliveryRefusedError, Sync, ranks_of
from verl_sync_plugin.sync.endpoint import EngineConnection, RolloutEndpoint
from verl_sync_plugin.sync.lora import Factors, deliver, gathered
from verl_sync_plugin.sync.sender import BucketSender, slot_limit
from verl_sync_plugin.trainers.base import ParameterSource, ServedAdapter, TrainerBackend
from verl_sync_plugin.trainers.fp8 import QuantizingSource
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed
from verl_sync_plugin.verify import Cadence, Comparison, refuse_changed


class OtherDtypesError(Exception):
    """A sync is planned once more, with other dtypes."""


class ShardingManager(BaseShardingManager):
    """Moves the weights of one trainer into one rollout engine; one instance per trainer rank and run.

    A pair of trainer and rollout is a subclass that names its ``backend`` and is registered
    (``register_sharding_manager``); one may also override ``open_source`` alone, not for separate rollouts.
    Construction is collective over all trainer ranks.

    Args:
        engine: verl's training engine, which computes on ``device``.
        endpoint, rollout_dtype: this rank's rollout engine, and its ``rollout.dtype``.
        bucket_bytes: bound on what a rank stages of one bucket.
        agreement: in which the ranks settle; made here, by all ranks of the trainer, when not given.
        own: where the trainer's ranks settle among themselves, if the rollout's ranks are others.

    Attributes:
        report: of the last sync, or the one under way.
        planned: what this rank planned last; ``None`` before the first time.
        agreed: the plan that all ranks have, if there is one.
        keeps_staging: staging memory stays allocated between syncs; the same on all ranks. Who lets the engine sleep
            says False where the room for it is short.
        asks_early: an engine that is awake is asked to load before the ranks plan, and comes while they do; it
            generates nothing from then on.
    """

    backend: type[TrainerBackend] | None = None
    trainer: TrainerBackend | None = None
    asks_early: ClassVar[bool] = True

    def __init__(
        self,
        engine: Any,
        endpoint: RolloutEndpoint,
        config: SyncConfig,
        bucket_bytes: int,
        device: torch.device,
        rollout_dtype: str = "bfloat16",
        *,
        agreement: Agreement | None = None,
        own: Agreement | None = None,
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.config = config
        self._device = device
        if self.backend is not None:
            self.trainer = self.backend(engine, config, device, rollout_dtype)
        self.source: ParameterSource | None = None
        self.agreement = agreement or Agreement(config.timeout_seconds)
        self._own, self._separate = own or self.agreement, own is not None
        self.sender = BucketSender(device, config.timeout_seconds)
        self.connection = EngineConnection(self.agreement, endpoint, self.sender, config.timeout_seconds)
        self.deliveries = Deliveries(config, self.agreement, self.sender, own)
        self.comparison = Comparison(config, self.agreement, endpoint.ranks, endpoint.real_weights)
        self.cadence = Cadence(config.verify)
        self.report = SyncReport()
        self._measured = partial(measured, device=device, attempt=self.agreement.attempt)
        self.planned: Plan | None = None
        self.agreed: Plan | None = None
        self._senders: tuple[int, ...] = ()  # of all ranks, where they are separate
        self.keeps_staging = True
        self._bucket_bytes = bucket_bytes
        self._base_sent = False
        self._news = False  # a load map came since the last sync that ended well
        self._adapter: ServedAdapter | None = None

    def open_source(self) -> ParameterSource:
        """The parameter source of the trainer; called at the first sync, and again if the engine asks for other dtypes.
        Raises ValueError, with key, value and remedy, where this manager cannot sync the trainer, or the engine cannot
        serve its adapter."""
        if self.trainer is None:
            raise TypeError(f"{type(self).__qualname__}: name a backend (a TrainerBackend), or override open_source")
        source = self.trainer.open_source()
        if self.trainer.serves_adapter:
            self.endpoint.engine.refuse_adapter(self.trainer.open_adapter(source).settings, {})
        if self.trainer.policy.blocks:
            return QuantizingSource(source, self.trainer.policy, self._device, self.config.timeout_seconds)
        return source

    @property
    def staging_to_come(self) -> int:
        """Bytes of staging memory that the next sync will allocate, as far as the last one shows."""
        return max(self.report.staging_bytes - self.sender.staging_bytes, 0)

    async def update_weights(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """Runs one sync, of verl's version ``global_steps``. Collective over all trainer ranks. ``wake_tags``: memory
        that the engine needs for loading; empty when it is awake.

        Raises SyncError, with the same text on every rank, where any rank or engine failed. Trainer weights are as
        before, the engine's may be half written, so that it generates nothing until a sync succeeds. The next call
        starts from nothing."""
        try:
            self.report = self._new_report(global_steps)
            served = self.serves_adapter()
            if not served or self.lacks_base():
                self._base_sent = False
                await self._send_weights(wake_tags, global_steps)
                self._base_sent = True
            if served:
                with self._measured(self.report), self.report.stage("update_weights"):
                    await self.send_adapter(None if global_steps is None else str(global_steps))
        except BaseException as error:
            await self._leave(error)
            raise
        return self.report

    async def _leave(self, error: BaseException) -> None:
        """Drops a failure that nobody has heard of; where only this rank knows it, the others hear that it is gone. The
        engine generates nothing."""
        self.agreement.forget()
        if not isinstance(error, SyncError | asyncio.CancelledError):
            self.agreement.ranks.close()
        await self.connection.give_up(str(error) or repr(error))

    def serves_adapter(self) -> bool:
        """True if the engine serves the trainer's adapter itself (``lora.merge=False``); the same on all ranks."""
        return self.trainer is not None and self.trainer.serves_adapter

    def lacks_base(self) -> bool:
        """True if the base has to travel before the adapter; the same on all ranks. To an engine that began with the
        checkpoint, too: a sync proves what it holds, its own load does not."""
        return not self._base_sent

    def _new_report(self, global_steps: int | None) -> SyncReport:
        ranks, trainer = self.agreement.ranks, self.trainer
        run = {"rank": ranks.rank, "ranks": ranks.size, "engine": self.endpoint.name}
        if trainer is not None:
            run |= {"trainer": trainer.name, "model": trainer.model}
        return SyncReport.begun(global_steps, type(self).__name__, **run)

    async def _send_weights(self, wake_tags: list[str], global_steps: int | None) -> None:
        with no_collection(), progress(self.report, self.agreement.ranks.rank == 0), self._measured(self.report):
            while True:
                try:
                    await self._sync(wake_tags, global_steps)
                    break
                # Both are known before anything is loaded; the sync runs once more
                except DeliveryRefusedError as error:
                    self.deliveries.fall_back(error)
                except OtherDtypesError:
                    if self.trainer is not None:
                        self.source = None  # opened again, it says other dtypes
                await self.connection.leave()  # after that, for the wait can be cancelled
                wake_tags = []  # the engine is awake by now
        with self.agreement.attempt():
            note_device_memory(self.report, self._device, "synced")

    async def _sync(self, wake_tags: list[str], global_steps: int | None) -> None:
        """Runs one sync: plan, wake (meanwhile fill the first slots, or hash parameters), connect, transfer, commit.
        All ranks settle between these, and once per bucket. ``finish`` comes later, when the trainer has made room."""
        stage, early = self.report.stage, self.asks_early and not wake_tags
        self.connection.begin(global_steps)
        try:
            with stage("update_weights"):
                if early:
                    self.connection.ask()
                with stage("plan"):
                    sync, delivery = self.plan()
                    self.report.delivery = delivery.name
            await self.wake(wake_tags, meanwhile=partial(delivery.fill, sync))
            self.report.staging_bytes = self.sender.staging_bytes
            with stage("update_weights"):
                if not early:
                    self.connection.ask()
                with stage("connect"):
                    greet = partial(self._greet, delivery, sync)
                    news = await self.connection.connect(greet, lambda: not self.comparison.knows(sync.plan))
                    self._news |= news
                    if wake_tags:
                        with self.agreement.attempt():
                            note_device_memory(self.report, self._device, "weights")
                    if news:
                        self._learn(sync.plan)
                delivery.run(sync)  # the transfer
                with stage("commit"):
                    await self._commit(sync, delivery)
                self.cadence.note(sync.plan.digest, restarts=self._news and not sync.verified)
                self._news = False
        finally:  # hangs up, and drops every reference to the trainer's parameters
            self.sender.hang_up()
            if self.source is not None:
                self.source.release()

    def plan(self) -> tuple[Sync, Delivery]:
        """Collective: the sync and its delivery, in one round as long as nothing has changed. The trainer's ranks plan,
        and hand others what is new."""
        shards: list[Shard] = []
        # Where they are separate, an error of all trainer ranks is news for the rollout ranks
        with self.agreement.attempt() if self._separate else nullcontext():
            shards = self._open()
        with self.agreement.attempt():
            if self.source is not None and not self.agreement.failed:
                shards = shards or self.source.shards()
                self.make_plan(shards)
        sync, (new, *votes) = self._vote(shards, self.agreed)
        if new:
            self.agreed = None
            agreed = self._agree()
            sync, (_, *votes) = self._vote(shards, agreed)
            self.agreed = agreed
        assert sync is not None, "no rank has failed"
        return sync, self.deliveries.take(sync, votes)

    def _open(self) -> list[Shard]:
        """Collective over the trainer's ranks: opens the trainer; returns its shards where they had to be read."""
        own, reach = self._own, self.deliveries.reach
        unsure = self.source is None or self.agreed is None  # the same on all; else all have opened it
        if unsure and own.any("asking who has not opened the trainer", lambda: self.source is None):
            self.source = own.step("opening the trainer", self.open_source)
        assert self.source is not None, "opened"
        source = self.source = self.source.agree_on_layout(own)
        if reach.sharded is not None:
            return []
        shards = own.step("reading the shards", source.shards)  # it knows its group from then on
        reach.decide(own, ranks_of(source.group, own.ranks.rank), "ranks that share out the model")
        return shards

    def make_plan(self, shards: list[Shard]) -> None:
        """Plans all shards of this rank; keeps the plan as long as the trainer's layout stays. Not collective."""
        bases, sharded = tuple(shard.base for shard in shards), bool(self.deliveries.reach.sharded)
        if self.planned is None or self.planned.bases != bases or self.planned.sharded != sharded:
            self.planned = plan_buckets(bases, slot_limit(self._bucket_bytes), sharded)

    def _agree(self) -> Plan | None:
        """Collective, where any rank's plan is new: that of all ranks. Raises SyncError where they differ."""
        self._own.same_on_all("the tensors to sync (plan digest)", self.planned.digest if self.planned else "")
        return self.planned

    def _vote(self, shards: list[Shard], agreed: Plan | None) -> tuple[Sync | None, list[int]]:
        """Collective: the sync, if this rank's plan is agreed on; and sums of all ranks: plans not agreed on, votes."""
        sync, votes = None, [1, 0, 0, 0]
        plan, source, report = self.planned, self.source, self.report
        with self.agreement.attempt():
            if plan is not None and plan is agreed and source is not None and not self.agreement.failed:
                report.bucket_bytes = self._bucket_bytes or plan.slot_bytes
                report.nbytes, report.buckets, report.tensors = plan.nbytes, len(plan.buckets), len(plan.names)
                senders = self._senders or ranks_of(source.group, self.agreement.ranks.rank)
                sync = Sync(plan, source, shards, report, senders, self.cadence.due(plan.digest), self.keeps_staging)
                votes = [0, *self.deliveries.votes(sync)]
        return sync, self.agreement.vote("planning the sync", votes).tolist()

    async def wake(self, tags: list[str], meanwhile: Callable[[], None]) -> None:
        """Collective: the leader has the engine resume ``tags`` (the same on all ranks; none when it is awake) while
        every rank does something else, which may settle and raise SyncError on all ranks alike. The report gets the
        seconds of that as ``update_weights``, and those beyond as ``resume_weights``. A failed engine is heard of when
        the ranks settle next. It has answered by then, so that the next sync finds it idle."""
        report, agreement = self.report, self.agreement
        if not tags:
            with report.stage("update_weights"):
                meanwhile()
            return
        with agreement.attempt():
            note_device_memory(report, self._device, "asleep")
        before = report.stages.get("update_weights", 0.0)
        with report.stage("resume_weights"):
            waking: list[asyncio.Future[None]] = []  # none of a rank that does not speak for the engine
            with agreement.attempt():
                if self.endpoint.leader:
                    waking = [asyncio.ensure_future(self.endpoint.resume(tags))]
                    await asyncio.sleep(0)  # it sends its request here: what comes next blocks this loop
            try:
                with report.stage("update_weights"):
                    meanwhile()
            except BaseException:
                await asyncio.gather(*waking, return_exceptions=True)
                raise
            with agreement.attempt():  # also on a rank that has failed: the engine is idle when this returns
                await asyncio.gather(*waking)
        # What overlaps with the wake counts as update_weights already
        report.stages["resume_weights"] -= report.stages.get("update_weights", 0.0) - before

    def _greet(self, delivery: Delivery, sync: Sync) -> str:
        """Opens the sync with this rank's engine rank; returns why that refuses the delivery."""
        answer = delivery.handshake(sync, self.comparison.map.digest if self.comparison.map is not None else "")
        if answer.map is not None:
            self.comparison.note(answer.map)
        return answer.refusal

    def _learn(self, plan: Plan) -> None:
        """Collective: before anything is loaded, takes in what the engine ranks said that their models do. Raises, the
        same on every rank, SyncError, with names, where the engine leaves something of the plan out, and
        OtherDtypesError where some tensors travel in another dtype now."""
        trainer = self.trainer
        kept, blocks = self.comparison.learn(plan), self.comparison.blocks
        if (kept or blocks) and self.agreement.any(
            "learning dtypes", lambda: trainer is not None and trainer.policy.learn(kept, blocks)
        ):
            if self.agreement.ranks.rank == 0:
                say("some tensors have to travel in another dtype, that of the engine; planning the sync again")
            raise OtherDtypesError
        if not self.comparison.knows(plan):
            text = f"the engine keeps {next(iter(blocks))} in fp8, and this trainer does not quantize"
            raise SyncError(f"weight sync failed: {text}. Remove actor_rollout_ref.rollout.quantization=fp8.")

    async def _commit(self, sync: Sync, delivery: Delivery) -> None:
        """Collective: has the engine ranks finish, compares hashes and waits for the engine's answer. Raises SyncError,
        the same on every rank, where any rank failed, or bytes changed on the way."""
        agreement, comparison, report = self.agreement, self.comparison, sync.report
        weighed = torch.empty(0)
        with agreement.attempt():
            if not agreement.failed:
                delivery.check_finite()
                weighed = comparison.weighed(self.sender.sums(sync.plan), self._commit_engine_rank(sync), sync.verified)
        # Before waiting for the engine's answer: it gives none while one of its ranks waits for us to hang up
        try:
            agreement.settle("committing")
        finally:
            # The engine ranks have unmapped the slots; one that failed before does so in the next sync
            if report.in_place or not sync.keeps_staging:
                with agreement.attempt():
                    self.sender.unstage()
        with agreement.attempt():
            if self.connection.pending is not None:
                report.stages = {"sleep": await self.endpoint.answered(self.connection.pending), **report.stages}
        comparison.compare(weighed)
        report.hashed_tensors = len(sync.plan.names)
        report.coverage_expected = comparison.tensor_count
        report.coverage_missing = len(comparison.unwritten)
        if sync.verified:
            report.verified_tensors, report.not_comparable = len(comparison.compared), len(comparison.left_out)

    def _commit_engine_rank(self, sync: Sync) -> Committed | None:
        """Has the engine rank commit; ``None`` where this rank has none."""
        report = sync.report
        committed = self.sender.commit(not sync.keeps_staging) if self.endpoint.ranks else None
        self.deliveries.in_place.note(committed, sync.plan)
        if committed is not None:
            report.replayed_tensors, report.activation_bytes = committed.replayed_tensors, committed.activation_bytes
            if committed.held is not None:
                refuse_changed(committed.held.changed)
        return committed

    async def send_adapter(self, version: str | None) -> None:
        """Collective: gathers the adapter's factors and has the engine load them; errors as of ``update_weights``."""
        try:
            settings, factors = self.gather_adapter()
            with self.report.stage("deliver_adapter"):
                await deliver(self.agreement, self.endpoint, settings, factors, self.report, version)
        finally:
            if self._adapter is not None:
                self._adapter.release()

    def gather_adapter(self) -> tuple[Mapping[str, Any], Callable[[], Factors]]:
        """Collective: returns the adapter as ``deliver`` takes it, which is on a rank that has a trainer."""
        assert self.trainer is not None, "its adapter is served"
        adapter = self._adapter = self._adapter or self._own.step("opening the adapter", self.open_adapter)
        what, dtype = "gathering the adapter", self.trainer.policy.dtype
        run = gathered(adapter, f"adapter {self._own.new_name()}", dtype, self.config.timeout_seconds)
        with self.report.stage("gather"):
            factors = self._own.run(what, run) or {}
        self._own.settle(what)
        return adapter.settings, lambda: factors

    def open_adapter(self) -> ServedAdapter:
        """Called once, on a rank that has a trainer."""
        assert self.trainer is not None, "its adapter is served"
        if self.source is None:
            self.source = self.open_source()
        return self.trainer.open_adapter(self.source)

    async def finish(self, tags: list[str]) -> SyncReport:
        """Second half of waking the engine, after the trainer has made room on all ranks: resumes ``tags``, then
        flushes once; errors as of ``update_weights``."""
        try:
            with self.report.stage("resume_kv"):
                with self.agreement.attempt():  # also on a rank that has failed: else the engine's gate stayed shut
                    if self.endpoint.leader:
                        await self.endpoint.finish(tags)
                self.agreement.settle("resuming the engine's KV cache")
            with self.agreement.attempt():  # if this fails, the next sync does
                note_device_memory(self.report, self._device, "awake")
        except BaseException as error:
            await self._leave(error)
            raise
        return self.report
