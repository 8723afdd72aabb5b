# SPDX-License-Identifier: Apache-2.0
"""Brings checkpoints to one SGLang model the way trainer ranks do: the real packer and unpacker without a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from contract import sglang_models as models
from contract.sources import shard_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.engine.load import ModelLoad, refuse_rearranged
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Manifest
from verl_sync_plugin.verify import Comparison, refuse_changed

CPU = torch.device("cpu")


class Wire:
    """Brings checkpoints to one model the way trainer ranks do; a tensor that comes twice is tied and travels once."""

    def __init__(
        self,
        model: Any,
        weights: models.Weights,
        ranks: int,
        bucket_bytes: int,
        sharded: bool = False,
        verified: bool = True,
    ) -> None:
        self.model = model
        self.verified = verified
        self._ranks = ranks
        bases = tuple(shard.base for shard in self._shards(weights, 0))
        self.plan: Plan = plan_buckets(bases, bucket_bytes, sharded)
        self._packers = [Packer(CPU, self.plan, rank) for rank in range(ranks)]
        self._known = SGLangModel(model, dist.get_rank())
        self.load = ModelLoad(self._known, Manifest.of(self.plan), CPU)
        self.agreement = Agreement(60.0)
        self.agreement.ranks.trainers = tuple(range(ranks))  # all of them are on every model rank
        self.comparison = Comparison(SyncConfig(), self.agreement, range(dist.get_world_size()), True)

    @property
    def left(self) -> dict[str, str]:
        """Lists what the model loads itself, and why."""
        names = sorted(self.plan.names)
        return {names[left.tensor]: left.why for left in self.load.map.left}

    def _shards(self, weights: models.Weights, rank: int) -> list[Shard]:
        tied: dict[int, tuple[tuple[str, ...], torch.Tensor]] = {}
        for name, tensor in weights:
            names, _ = tied.get(id(tensor), ((), tensor))
            tied[id(tensor)] = (*names, name), tensor
        return [shard_of(names, tensor, rank, self._ranks) for names, tensor in tied.values()]

    def sync(self, weights: models.Weights, behind: Callable[[], None] = lambda: None) -> int:
        """Sends ``weights`` into memory that holds rubbish; returns how many tensors were replayed. Calls ``behind``
        between the last copy and the proof of what the parameters hold."""
        models.poison(self.model)
        self._sent = [self._shards(weights, rank) for rank in range(self._ranks)]
        for packer in self._packers:
            packer.begin()
        self.load.begin()
        if not self.comparison.knows(self.plan) or self.load.map != self.comparison.map:
            self.comparison.note(self.load.map)
            self.comparison.learn(self.plan, loaded=False)
        self._transfer()
        replayed = self.load.replayed
        self.load.finish()
        refuse_rearranged(self._known, CPU)
        if not self.comparison.knows(self.plan):
            self.comparison.learn(self.plan, loaded=True)
        behind()
        self.compare()
        return replayed

    def compare(self) -> None:
        """Compares what was read, and what the parameters hold, as the trainer ranks do; what was packed counts
        once."""
        held = self.load.held() if self.verified else None
        weighed = torch.empty(0)
        with self.agreement.attempt():
            refuse_changed(held.changed if held else ())
            sent = torch.stack([packer.sums() for packer in self._packers]).sum(0) * (dist.get_rank() == 0)
            weighed = self.comparison.weighed(sent, Committed(sums=self.load.sums(), held=held), self.verified)
        self.agreement.settle("verifying")
        self.comparison.compare(weighed)

    def _transfer(self) -> None:
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8)]
        slots += [slots[0].clone() for _ in range(self._ranks - 1)] if self.plan.sharded else []
        for index in range(len(self.plan.buckets)):
            for rank, packer in enumerate(self._packers):
                packer.pack(index, slots[rank % len(slots)], self._sent[rank])
            self.load.load(index, slots)
            for slot in slots:
                slot.fill_(0xEE)  # used again
