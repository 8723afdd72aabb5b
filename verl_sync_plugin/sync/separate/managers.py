# SPDX-License-Identifier: Apache-2.0
"""The phase of separate trainers and rollouts: ``ShardingManager``'s, with the two halves of a rank in two processes.

A trainer rank plans, packs and sends; a rollout rank, in verl's process beside an engine rank, receives and has the
engine rank load. Both go through the same steps of the same method (``ShardingManager._sync``), and settle together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import SEPARATE_BACKEND, SyncConfig
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.lora.refusals import RefuseUntied
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.choice import Choice
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.planning import Planning
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.protocol import LoadRequest
from verl_sync_plugin.transport.ranks import Alone, Ranks

MERGE_KEY = "actor_rollout_ref.model.lora.merge"


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

    def _agree(self) -> Agreement:
        return Agreement(self.config.timeout_seconds, ranks=self._ranks)

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

    def take_over(self, before: SeparateTrainer) -> None:
        """Goes on with what the manager of the group before has opened of the trainer."""
        self.source, self.trainer = before.source, before.trainer

    def open_source(self) -> ParameterSource:
        """See ``ShardingManager``.

        Raises:
            ValueError: also where the engine is to serve the adapter itself, or cannot hold what it changes.
        """
        if self.trainer.serves_adapter:
            raise ValueError(
                f"{MERGE_KEY}=False with actor_rollout_ref.rollout.checkpoint_engine.backend={SEPARATE_BACKEND}: "
                f"adapters are not sent to separate rollouts. Set {MERGE_KEY}=True."
            )
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
            if self._own.any("asking who has not opened the trainer", lambda: self.source is None):
                self.source = self._own.step("opening the trainer", self.open_source)
            assert self.source is not None, "opened"
            self.source = self.source.agree_on_layout(self._own) or self.source
            assert isinstance(self._bucket_bytes, int), "verl gives a size"
            plan, shards = self.planning.agree(self.source, self._bucket_bytes, self.choice.reach)
            if self.source.group is not None:
                senders = tuple(dist.get_process_group_ranks(self.source.group))
        return self._sync_of(sync_id, *self._hand_out(plan, senders), shards)


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

    def plan(self, sync_id: str) -> Sync:
        """Collective: takes the trainer's plan."""
        return self._sync_of(sync_id, *self._hand_out(None, ()), [])


class NoTrainer(ParameterSource):
    """What a rollout rank holds of the trainer's parameters: nothing."""

    def shards(self) -> list[Shard]:
        return []


class NoEngine(RolloutEndpoint):
    """What a trainer rank has beside it of a separate rollout: nothing, so that it never leads."""

    @property
    def leader(self) -> bool:
        return False

    @property
    def restores_uncovered(self) -> bool:
        return False

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    async def resume(self, tags: list[str]) -> None:
        raise AssertionError("no leader")

    async def finish(self, tags: list[str]) -> None:
        raise AssertionError("no leader")

    async def abandon(self, why: str) -> None:
        raise AssertionError("no leader")

    async def publish(self, report: dict[str, Any]) -> None:
        raise AssertionError("no leader")

    async def load_adapter(
        self, settings: Mapping[str, Any], factors: dict[str, torch.Tensor], weight_version: str | None
    ) -> LoadOutcome:
        raise AssertionError("no leader")

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        raise AssertionError("no leader")

    def flush_behind_load(self) -> None:
        raise AssertionError("no leader")
