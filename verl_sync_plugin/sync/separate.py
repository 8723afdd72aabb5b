# SPDX-License-Identifier: Apache-2.0
"""The phase of trainers and rollouts on GPUs of their own: ``ShardingManager``'s, over a network group.

A trainer rank plans, packs and sends; a rollout rank, in verl's process next to an engine rank, receives and has the
engine rank load. Both go through the same steps of the same method (``ShardingManager._sync``), and settle together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.sync.adapter import deliver
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.ways import Sync, Way, Ways
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.transport.agreement import Agreement, Alone, Ranks
from verl_sync_plugin.transport.joint import JointRanks


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on its way from trainer rank 0 to the engines that serve it.

    Attributes:
        settings: fields of PEFT's ``LoraConfig``.
        factors: by their names in an adapter checkpoint, as safetensors writes them: what pickles tensors would need
            the trainer's packages to unpickle them, where one of these has replaced torch's own way.
    """

    settings: dict[str, Any]
    factors: bytes


class SeparateManager(ShardingManager):
    """Base of both halves. Construction is collective over trainer and rollout ranks.

    Args:
        ranks: both halves.
        own: the trainer's ranks among themselves; on a rollout rank, this rank alone.
        engine, endpoint, config, args: as in ``ShardingManager``.
    """

    asks_early = False  # the engine has requests to answer while the trainer plans

    def __init__(
        self, ranks: JointRanks, own: Ranks, engine: Any, endpoint: RolloutEndpoint, config: SyncConfig, *args: Any
    ) -> None:
        self._ranks = ranks
        self._own = Agreement(config.timeout_seconds, ranks=own)
        super().__init__(engine, endpoint, config, *args, agreement=Agreement(config.timeout_seconds, ranks=ranks))
        self._serves: bool | None = None  # what the trainer says of its adapter, once there is a group

    def name_sync(self, global_steps: int | None) -> str:
        # Every group counts from 1, and an engine rank may still complain of a sync of the group before
        return f"{super().name_sync(global_steps)} of group {self._ranks.name}"

    def _make_ways(self) -> Ways:
        ways = Ways(self.config, self.agreement, self.sender, self._device, self._own)
        ways.reach.decide_separate()
        return ways

    def _hand_out(self, plan: Plan | None, senders: tuple[int, ...]) -> tuple[Plan, tuple[int, ...], bool]:
        """Collective: rank 0's plan and senders, and whether the sync is verified, on all ranks; the plan travels where
        any rank lacks it."""
        self.agreement.settle("planning the sync")
        named = (plan.digest, senders, self.cadence.due(plan.digest)) if plan else ("", senders, False)
        digest, senders, verified = self.agreement.share("naming the plan", named)
        known = plan or self.planned
        lacking = known is None or known.digest != digest
        if self.agreement.settle("asking who lacks the plan", waiting=lacking):
            handed = self.agreement.share("handing out the plan", plan)
            known = handed if lacking else known
        assert known is not None, "handed out"
        self.planned = known
        return known, senders, verified

    def _planned(
        self, sync_id: str, plan: Plan | None, senders: tuple[int, ...], shards: list[Shard]
    ) -> tuple[Sync, Way]:
        """Collective: the sync of rank 0's plan, and its way."""
        plan, senders, verified = self._hand_out(plan, senders)
        sync, votes = self._sync_of(sync_id, plan, senders, self._ranks.rollouts, verified, shards), [0] * 4
        with self.agreement.attempt():
            votes = self.ways.votes(sync)
        return sync, self.ways.take(sync, self.agreement.vote("choosing the way", votes).tolist())

    def serves_adapter(self) -> bool:
        if self._serves is None:
            self._serves = self.agreement.share("telling who serves an adapter", super().serves_adapter())
        return self._serves

    def lacks_base(self) -> bool:
        def lacks() -> bool:
            return bool(self.endpoint.ranks) and not self._base_sent

        return self.agreement.any("asking who lacks the base", lacks)

    async def send_adapter(self, version: str | None) -> None:
        """The trainer's ranks gather the adapter, rank 0 hands it to all. Errors as of ``ShardingManager``."""
        found: Adapter | None = None
        with self.agreement.attempt():
            found = self.gather_adapter()
        self.agreement.settle("gathering the adapter")
        with self.report.stage("deliver_adapter"):
            adapter = self.agreement.share("handing out the adapter", found)
            assert adapter is not None, "gathered by the trainer's ranks"
            await self.agreement.step_async("loading the adapter", lambda: self._load_adapter(adapter, version))

    def gather_adapter(self) -> Adapter | None:
        """Collective over the trainer's ranks, of which rank 0 returns the trainer's adapter."""
        return None

    async def _load_adapter(self, adapter: Adapter, version: str | None) -> None:
        if self.endpoint.leader:
            factors = safetensors.torch.load(adapter.factors)
            await deliver(self.endpoint, adapter.settings, factors, self.report, version)

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
        endpoint: without an engine, for what it refuses.
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
        endpoint: RolloutEndpoint,
        engine: Any,
        config: SyncConfig,
        bucket_bytes: int,
        device: torch.device,
        rollout_dtype: str,
    ) -> None:
        super().__init__(ranks, own, engine, endpoint, config, bucket_bytes, device, rollout_dtype)
        self.trainer = backend(engine, config, device, rollout_dtype)

    def take_over(self, before: SeparateTrainer) -> None:
        """Goes on with what the manager of the group before has opened of the trainer."""
        self.source, self.trainer, self._adapter_sender = before.source, before.trainer, before._adapter_sender

    def gather_adapter(self) -> Adapter | None:
        if self._adapter_sender is None:
            self._adapter_sender = self._own.step("opening the adapter", self.open_adapter)
        sender, report = self._adapter_sender, self.report
        try:
            factors = sender.gather(self._own, report)
            if self.agreement.ranks.rank:
                return None
            # Cloned: names that share a factor, as those that Megatron fuses do, safetensors does not take
            whole = torch.contiguous_format
            packed = safetensors.torch.save({n: f.cpu().clone(memory_format=whole) for n, f in factors.items()})
        finally:
            sender.release()
        report.nbytes += len(packed)
        report.tensors += len(factors)
        return Adapter(dict(sender.settings), packed)

    def plan(self, sync_id: str) -> tuple[Sync, Way]:
        """Collective: the trainer's ranks plan among themselves; what comes of it is handed out to all."""
        plan: Plan | None = None
        shards: list[Shard] = []
        senders: tuple[int, ...] = (0,)
        with self.agreement.attempt():
            if self._own.any("asking who has not opened the trainer", lambda: self.source is None):
                self.source = self._own.step("opening the trainer", self.open_source)
            assert self.source is not None, "opened"
            self.source = self.source.agree_on_layout(self._own) or self.source
            plan, shards = self._make()
            if self.source.group is not None:
                senders = tuple(dist.get_process_group_ranks(self.source.group))
        return self._planned(sync_id, plan, senders, shards)

    def _make(self) -> tuple[Plan, list[Shard]]:
        """Collective over the trainer's ranks: their plan, and all shards of this rank."""
        source, shards = self.source, list[Shard]()
        assert source is not None, "opened"

        def changed() -> bool:
            shards.extend(source.shards())
            self.make_plan(source, shards)
            return self._plan_changed

        if self._own.any("planning the sync", changed):
            self._compare_plans(self._own)
        assert self.planned is not None, "made"
        return self.planned, shards


class _NoTrainer(ParameterSource):
    def shards(self) -> list[Shard]:
        return []


class SeparateRollout(SeparateManager):
    """A rollout rank, next to an engine rank.

    Args:
        ranks: both halves.
        endpoint: the engine.
        config: the sync's settings.
        device: where the engine rank computes.
    """

    def __init__(self, ranks: JointRanks, endpoint: RolloutEndpoint, config: SyncConfig, device: torch.device) -> None:
        super().__init__(ranks, Alone(), None, endpoint, config, 0, device)
        self.source = _NoTrainer()

    def take_over(self, before: SeparateRollout) -> None:
        """Goes on with what the engine got in the group before."""
        self._base_sent = before._base_sent

    def plan(self, sync_id: str) -> tuple[Sync, Way]:
        """Collective: takes the trainer's plan."""
        return self._planned(sync_id, None, (), [])
