"""The resharding phase of one trainer rank, whatever the trainer and the rollout engine are.

Lifecycle of a sync (every rank; ``-- settle`` marks where all ranks agree to go on or raise the same error):

    enter         collect this rank's shards, plan the buckets                     -- settle, plans compared
    awake         leader resumes the engine's weights, the first slots are filled  -- settle
    connect       leader asks for the load, every rank meets its engine rank       -- settle
    per bucket    wait until the slot is free, pack, -- settle, gather or leave where it is, hand over
    commit        engine ranks finish, hashes are compared, the ledger proves coverage -- settle
    exit          hang up, forget the shards

The next buckets are packed while the engine loads the last one. Of an engine that is awake already the load is asked
for before anything else, so that the request is on its way while the ranks plan. Awake, stage 2, comes later
(``hooks/worker.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from verl.utils.ulysses import BaseShardingManager

from verl_sync_plugin.config.bucket_size import AutoBucket
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.memory.collection import no_collection
from verl_sync_plugin.memory.gauges import PeakMemory, note_device_memory
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.commit import Ending
from verl_sync_plugin.sync.connect import MeetingPoint
from verl_sync_plugin.sync.delivery.direct import Direct
from verl_sync_plugin.sync.delivery.direct_stream import DirectStream
from verl_sync_plugin.sync.delivery.gathered import BucketStream
from verl_sync_plugin.sync.delivery.sharded import ShardedStream
from verl_sync_plugin.sync.delivery.shared import Delivery, PeersUnreachableError
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.planning import Planning
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.wake import Waking
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.verify.hashes import HashCheck
from verl_sync_plugin.verify.uses import UseCheck


class ShardingManager(BaseShardingManager):
    """Moves the weights of one trainer engine into one rollout engine; one instance per trainer rank and run.

    Construction is collective over all trainer ranks.

    Args:
        engine: verl's training engine.
        endpoint: the rollout engine beside this rank.
        config: the sync's settings.
        bucket_bytes: bound on what a rank stages of one bucket, or what finds it in the first sync.
        device: where the trainer computes.
        rollout_dtype: ``rollout.dtype``, what ``wire_dtype=auto`` means.
    """

    trainer: ClassVar[str] = ""

    def __init__(
        self,
        engine: Any,
        endpoint: RolloutEndpoint,
        config: SyncConfig,
        bucket_bytes: int | AutoBucket,
        device: torch.device,
        rollout_dtype: str = "bfloat16",
    ) -> None:
        super().__init__()
        self.engine = engine
        self.endpoint = endpoint
        self.config = config
        self.rollout_dtype = rollout_dtype
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._agreement = Agreement(config.timeout_seconds)
        self._sender = BucketSender(device, config.timeout_seconds)
        self._meeting = MeetingPoint(self._agreement, endpoint, self._sender, config)
        self._delivery = Delivery(config, self._agreement)
        self._hashes = HashCheck(self._agreement)
        self._uses = UseCheck(self._agreement, endpoint.ranks)
        self._waking = Waking(self._agreement, endpoint, device)
        self._source: ParameterSource | None = None
        self._shards: list[Shard] = []
        self._planning = Planning(self._agreement, self._sender, self._delivery)
        self._direct = Direct(config, self._agreement, self._sender, device)
        self._ending = Ending(config, self._agreement, self._sender, self._hashes, self._uses, self._direct, endpoint)
        self._syncs = 0
        self._sync_id = ""
        self.report = SyncReport()

    @property
    def agreement(self) -> Agreement:
        """Where the ranks settle."""
        return self._agreement

    @abstractmethod
    def open_source(self) -> ParameterSource:
        """The parameter source of ``self.engine``; called once, at the first sync.

        Raises:
            ValueError: the engine is configured in a way this manager cannot sync; names key, value and remedy.
        """

    def __enter__(self) -> ShardingManager:
        try:
            self._agree_on_plan()
        except BaseException:
            self._forget()
            raise
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._sender.hang_up()
        self._forget()

    def _forget(self) -> None:
        self._shards = []
        if self._source is not None:
            self._source.release()

    async def update_weights(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """Runs one sync. Collective over all trainer ranks.

        Args:
            wake_tags: memory tags the engine needs for loading; empty when it is awake.
            global_steps: verl's weight version.

        Raises:
            SyncError: any rank or engine failed; the same text on every rank. Trainer weights are as before, the
                engine's may be half written, and the next call starts afresh.
        """
        self._syncs += 1
        self._sync_id = f"{self._syncs} (step {global_steps})"
        self.report = SyncReport(-1 if global_steps is None else int(global_steps), type(self).__name__)
        with no_collection():
            return await self._run(wake_tags, global_steps)

    async def _run(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        try:
            return await self._sync(wake_tags, global_steps)
        except PeersUnreachableError as error:  # known before anything was loaded
            (self._direct if self._direct.active else self._delivery).fall_back(error)
            self._sync_id += " once more"
            return await self._run([], global_steps)

    async def _sync(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        memory = PeakMemory(self._device)
        with self._agreement.attempt():
            memory.begin()
        if isinstance(self._bucket_bytes, AutoBucket):
            self._bucket_bytes = await self._waking.choose_bucket(self._bucket_bytes, wake_tags, self.report)
            wake_tags = []
        version = None if global_steps is None else str(global_steps)
        self._meeting.begin(self._sync_id)
        try:
            if not wake_tags:  # it is awake, and comes while the ranks plan
                with self.report.stage("update_weights"):
                    self._meeting.ask(version)
            with self:
                stream = self._open_stream()
                if wake_tags:
                    await self._waking.resume(wake_tags, self.report, partial(self._fill, stream))
                with self.report.stage("update_weights"):
                    if wake_tags:
                        self._meeting.ask(version)
                    else:
                        self._fill(stream)
                    with self.report.stage("connect"):
                        await self._meeting.meet()
                        self._greet()
                    stream.run()
                    with self.report.stage("commit"):
                        pending, first = self._meeting.pending, self._syncs == 1
                        await self._ending.commit(self._planning.ready(), self.report, pending, first)
        except PeersUnreachableError:
            await self._meeting.leave()
            raise
        except BaseException as error:
            await self._meeting.give_up(str(error) or repr(error))
            raise
        with self._agreement.attempt():  # the ranks settle once more in `finish`
            memory.into(self.report)
            note_device_memory(self.report, self._device, "synced")
        return self.report

    async def finish(self, tags: list[str]) -> SyncReport:
        """Awake, stage 2, after the trainer has made room on all ranks: resume ``tags``, flush once.

        Raises:
            SyncError: any engine failed; the same text on every rank.
        """
        await self._waking.finish(tags, self.report)
        return self.report

    async def publish(self) -> None:
        """After all else: the leader leaves the report where verl's trainer fetches it."""
        await self._waking.publish(self.report)

    def _agree_on_plan(self) -> None:
        agreement = self._agreement
        assert isinstance(self._bucket_bytes, int), "chosen before"
        self.report.bucket_bytes = self._bucket_bytes
        with self.report.stage("update_weights"), self.report.stage("plan"):
            self._agree_on_layout()
            with agreement.attempt():
                if self._source is None:
                    self._source = self.open_source()
                self._shards = self._source.shards()
            if not self._delivery.decided:
                agreement.settle("reading the shards")
            assert self._source is not None
            plan = self._planning.agree(self._source, self._shards, self._bucket_bytes)
            if self._direct.agree(plan, self._source, self._shards, self._planning.unstaged):
                self._planning.stage(self._source)
        self.report.nbytes, self.report.buckets, self.report.tensors = plan.nbytes, len(plan.buckets), plan.tensor_count

    def _agree_on_layout(self) -> None:
        """Collective, for trainers whose ranks hold different parts of the model: who holds what."""

    def _fill(self, stream: BucketStream) -> None:
        with self._agreement.attempt():
            if not self._direct.active:  # which begins on its own
                checks = self.config.verify_hashes, self.config.check_finite
                self._sender.begin(self._planning.ready(), stream.rank, *checks)
        stream.fill_ahead()

    def _greet(self) -> None:
        plan, verify = self._planning.ready(), self.config.verify_hashes
        if self._direct.active:
            self._direct.greet(self._sync_id, plan, verify, self._hashes.whole(plan))
            return
        asks = self._uses.asks(plan)
        used = self._delivery.greet(self._sync_id, self._sender, plan, verify, self._hashes.whole(plan), asks)
        if asks:
            self._uses.note(used)
            self._uses.compare(plan, loaded=False)

    def _open_stream(self) -> BucketStream:
        assert self._source is not None, "entered before"
        parts = (self._agreement, self._sender, self._planning.ready(), self._shards, self._source, self.report)
        if self._direct.active:
            return DirectStream(*parts)
        return (ShardedStream if self._planning.ready().sharded else BucketStream)(*parts)
