# SPDX-License-Identifier: Apache-2.0
"""The phase of separate trainers and rollouts: ``ShardingManager``'s, with the two halves of a rank in two processes.

A trainer rank plans, packs and sends; a rollout rank, in verl's process beside an engine rank, receives and has the
engine rank load. Both go through the same steps of the same method (``ShardingManager._sync``), and settle together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.lora.refusals import RefuseUntied
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.adapter import AdapterSender, send_apart
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.choice import Choice
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.planning import Planning
from verl_sync_plugin.sync.separate.absent import NoEngine, NoTrainer
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.ranks import Alone, Ranks


class SeparateManager(ShardingManager):
    """What both halves share. Construction is collective over trainer and rollout ranks.

    Args:
        ranks: both halves.
        own: the trainer's ranks among themselves; on a rollout rank, this rank alone.
        engine, endpoint, config, args: as in ``ShardingManager``.
    """

    def __init__(
        self, ranks: JointRanks, own: Ranks, engine: Any, endpoint: RolloutEndpoint, config: SyncConfig, *args: Any
    ) -> None:
        self._ranks = ranks
        self._own = Agreement(config.timeout_seconds, ranks=own)
        super().__init__(engine, endpoint, config, *args)
        self._plan: Plan | None = None
        self._served: bool | None = None  # as trainer rank 0 has it
        self._base_there = True  # nothing but an adapter is needed here
        self._adapter_sender: AdapterSender | None = None

    def _agree(self) -> Agreement:
        return Agreement(self.config.timeout_seconds, ranks=self._ranks)

    @property
    def _serves(self) -> bool:
        """Of a trainer rank: the engines serve the trainer's adapter themselves."""
        return False

    def _open_adapter(self) -> AdapterSender | None:
        """Of a trainer rank: sends the adapter; collective over the trainer's ranks."""
        return None

    async def move(self, wake_tags: list[str], global_steps: int | None) -> SyncReport:
        """One sync; of an adapter that is served the base only if any engine lacks it, then the adapter."""
        if self._served is None:
            self._served = self.agreement.share("asking whether an adapter is served", self._serves)
        if not self._served:
            return await super().move(wake_tags, global_steps)
        if self.agreement.any("asking who lacks the base", lambda: not self._base_there):
            await super().move(wake_tags, global_steps)
            self._base_there = True
        else:
            self.report = self.new_report(global_steps)
        version = None if global_steps is None else str(global_steps)
        with self.report.stage("update_weights"):
            if self._adapter_sender is None:
                with self.agreement.attempt():
                    self._adapter_sender = self._open_adapter()
            await send_apart(self._adapter_sender, self._own, self.agreement, self.endpoint, self.report, version)
        return self.report

    def _choose(self) -> Choice:
        choice = Choice(self.config, self.agreement, self.sender, self._device, self._own)
        choice.reach.decide_apart()
        return choice

    def _hand_out(self, plan: Plan | None, senders: tuple[int, ...]) -> tuple[Plan, tuple[int, ...], bool]:
        """Collective: rank 0's plan and senders, and whether the sync is verified, on all ranks; the plan travels where
        any rank lacks it."""
        self.agreement.settle("planning the sync")
        named = (plan.digest, senders, self.commit.due(plan)) if plan else ("", senders, False)
        digest, senders, verified = self.agreement.share("naming the plan", named)
        known = plan or self._plan
        lacking = known is None or known.digest != digest
        if self.agreement.settle("asking who lacks the plan", waiting=lacking):
            handed = self.agreement.share("handing out the plan", plan)
            known = handed if lacking else known
        assert known is not None, "handed out"
        self._plan = known
        return known, senders, verified

    def _sync_of(self, sync_id: str, plan: Plan, senders: tuple[int, ...], verified: bool, shards: list[Shard]) -> Sync:
        report, source = self.report, self.source
        assert source is not None, "opened"
        report.bucket_bytes, report.nbytes = plan.slot_bytes, plan.nbytes
        report.buckets, report.tensors = len(plan.buckets), plan.tensor_count
        return Sync(sync_id, plan, source, shards, report, senders, self._ranks.rollouts, verified)

    def close(self) -> None:
        """Gives everything back; the group is somebody else's."""
        self.sender.close()
        self.meeting.close()


class SeparateTrainer(SeparateManager):
    """A trainer rank.

    Args:
        ranks: both halves.
        own: the trainer's ranks.
        backend: of the trainer.
        refuse_untied: of the rollout engine, see ``RolloutEndpoint.refuse_untied``.
        engine: verl's training engine.
        config: the sync's settings.
        bucket_bytes: as in ``ShardingManager``.
        device: where the trainer computes.
        rollout_dtype: likewise.
    """

    def __init__(
        self,
        ranks: JointRanks,
        own: Ranks,
        backend: type[TrainerBackend],
        refuse_untied: RefuseUntied,
        engine: Any,
        config: SyncConfig,
        bucket_bytes: int,
        device: torch.device,
        rollout_dtype: str,
    ) -> None:
        super().__init__(ranks, own, engine, NoEngine(), config, bucket_bytes, device, rollout_dtype)
        self.trainer = backend(engine, config, device, rollout_dtype)
        self.planning = Planning(self._own)
        self._refuse_untied = refuse_untied
        self._base_there = not self.trainer.rewrites_base

    def take_over(self, before: SeparateTrainer) -> None:
        """Goes on with what the manager of the group before has opened of the trainer."""
        self.source, self.trainer, self._adapter_sender = before.source, before.trainer, before._adapter_sender

    @property
    def _serves(self) -> bool:
        return self.trainer.serves_adapter

    def _open_adapter(self) -> AdapterSender:
        source = self._opened()
        adapter = self._own.step("opening the adapter", lambda: self.trainer.open_adapter(source))
        return AdapterSender(adapter, self.trainer.policy.dtype, self.config)

    def open_source(self) -> ParameterSource:
        """See ``ShardingManager``.

        Raises:
            ValueError: also where the engine cannot hold what the adapter changes.
        """
        source = self.trainer.open_source()
        if source.prepares and (end := self.trainer.untied_end()):
            self._refuse_untied(self.trainer.architectures, f"the adapter's {end}")
        return source

    def plan(self, sync_id: str) -> Sync:
        """Collective: the trainer's ranks plan among themselves; what comes of it is handed out to all."""
        plan: Plan | None = None
        shards: list[Shard] = []
        senders: tuple[int, ...] = (0,)
        with self.agreement.attempt():
            source = self._opened()
            self.source = source.agree_on_layout(self._own) or source
            assert isinstance(self._bucket_bytes, int), "verl gives a size"
            plan, shards = self.planning.agree(self.source, self._bucket_bytes, self.choice.reach)
            if self.source.group is not None:
                senders = tuple(dist.get_process_group_ranks(self.source.group))
        return self._sync_of(sync_id, *self._hand_out(plan, senders), shards)

    def _opened(self) -> ParameterSource:
        if self._own.any("asking who has not opened the trainer", lambda: self.source is None):
            self.source = self._own.step("opening the trainer", self.open_source)
        assert self.source is not None, "opened"
        return self.source


class SeparateRollout(SeparateManager):
    """A rollout rank, beside an engine rank.

    Args:
        ranks: both halves.
        endpoint: the engine.
        config: the sync's settings.
        device: where the engine rank computes.
    """

    def __init__(self, ranks: JointRanks, endpoint: RolloutEndpoint, config: SyncConfig, device: torch.device) -> None:
        super().__init__(ranks, Alone(), None, endpoint, config, 0, device)
        self.source = NoTrainer()
        self._base_there = endpoint.restores_uncovered

    def plan(self, sync_id: str) -> Sync:
        """Collective: takes the trainer's plan."""
        return self._sync_of(sync_id, *self._hand_out(None, ()), [])
