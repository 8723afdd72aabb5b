# SPDX-License-Identifier: Apache-2.0
"""The phase of trainers and rollouts on GPUs of their own: ``ShardingManager``'s, over a network group.

A trainer rank plans, packs and sends; a rollout rank, in verl's process next to an engine rank, receives and has the
engine rank load. Both go through the same steps of the same method (``ShardingManager._sync``), and settle together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import safetensors.torch
import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.sync.delivery import ranks_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.lora import Factors
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, TrainerBackend
from verl_sync_plugin.transport.agreement import ALONE, Agreement, Ranks
from verl_sync_plugin.transport.joint import JointRanks

M = TypeVar("M", "SeparateTrainer", "SeparateRollout")
# A LoRA adapter on its way from trainer rank 0 to the engines that serve it: fields of PEFT's ``LoraConfig``, and the
# factors by their names in an adapter checkpoint, as safetensors writes them. What pickles tensors would need the
# trainer's packages to unpickle them, where one of these has replaced torch's own way
Adapter = tuple[dict[str, Any], bytes]


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
        self._own, everyone = (Agreement(config.timeout_seconds, ranks=each) for each in (own, ranks))
        super().__init__(engine, endpoint, config, *args, agreement=everyone, own=self._own)
        self.deliveries.reach.decide(everyone, tuple(range(ranks.size)), "trainer and rollout ranks")
        self._serves: bool | None = None  # what the trainer says of its adapter, once there is a group

    def _agree(self) -> Plan | None:
        """Collective: the plan of the trainer's ranks, which rank 0 hands to all."""
        with self.agreement.attempt():
            super()._agree()
        named = self.planned, ranks_of(self.source.group if self.source else None, 0)
        handed, self._senders = self.agreement.broadcast_object("handing out the plan", named)
        if self.trainer is None:
            self.planned = handed
        return self.planned

    def serves_adapter(self) -> bool:
        if self._serves is None:
            self._serves = self.agreement.broadcast_object("telling who serves an adapter", super().serves_adapter())
        return self._serves

    def lacks_base(self) -> bool:
        what = "asking who lacks the base"
        return self.agreement.any(what, lambda: bool(self.endpoint.ranks) and not self._base_sent)

    def gather_adapter(self) -> tuple[Mapping[str, Any], Callable[[], Factors]]:
        """The trainer's ranks gather the adapter, rank 0 hands it to all."""
        found: Adapter | None = None
        with self.agreement.attempt():
            if self.trainer is not None:
                settings, gathered = super().gather_adapter()
                if self.agreement.ranks.rank == 0:
                    # Cloned: names that share a factor, as those that Megatron fuses do, safetensors does not take
                    whole, factors = torch.contiguous_format, gathered()
                    packed = safetensors.torch.save({n: f.cpu().clone(memory_format=whole) for n, f in factors.items()})
                    self.report.nbytes += len(packed)
                    self.report.tensors += len(factors)
                    found = dict(settings), packed
        self.agreement.settle("gathering the adapter")
        adapter = self.agreement.broadcast_object("handing out the adapter", found)
        assert adapter is not None, "gathered by the trainer's ranks"
        return adapter[0], partial(safetensors.torch.load, adapter[1])

    def inherit(self, before: SeparateManager) -> None:
        """Goes on with what the manager of the group before has opened of the trainer, and what its engine has got."""
        self.source, self.trainer = before.source, before.trainer
        self._adapter, self._base_sent = before._adapter, before._base_sent

    def close(self) -> None:
        """Gives everything back; the group is somebody else's."""
        self.sender.close()
        self.connection.close()


class SeparateTrainer(SeparateManager):
    """A trainer rank. ``more`` is as in ``SeparateManager``; the endpoint has no engine, and refuses for it."""

    def __init__(self, backend: type[TrainerBackend] | None, *more: Any) -> None:
        self.backend = backend
        super().__init__(*more)


class _NoTrainer(ParameterSource):
    def shards(self) -> list[Shard]:
        return []


class SeparateRollout(SeparateManager):
    """A rollout rank, next to an engine rank, which computes on ``device``; all else is as in ``SeparateManager``."""

    def __init__(self, ranks: JointRanks, endpoint: RolloutEndpoint, config: SyncConfig, device: torch.device) -> None:
        super().__init__(ranks, ALONE, None, endpoint, config, 0, device)
        self.source = _NoTrainer()

    def make_plan(self, shards: list[Shard]) -> None:
        """Does nothing here."""


def manager_of(ranks: JointRanks, before: M | None, make: Callable[[], M]) -> M:
    """The manager of a group of ranks: that of the sync before, or a new one, which goes on with what that had."""
    if before is not None and before.agreement.ranks is ranks:
        return before
    if before is not None:
        before.close()
    manager = make()
    if before is not None:
        manager.inherit(before)
    return manager
