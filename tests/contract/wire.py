# SPDX-License-Identifier: Apache-2.0
"""Brings checkpoints to one SGLang model the way trainer ranks do: the real packer and unpacker without a channel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from contract import sglang_models as models
from verl_sync_plugin.copies.packing import Packer
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, Plan, View
from verl_sync_plugin.receiver.layout_key import LayoutKey
from verl_sync_plugin.receiver.ledger import Ledger
from verl_sync_plugin.receiver.proof import DestinationProof, refuse_rearranged
from verl_sync_plugin.receiver.unpacker import Unpacker
from verl_sync_plugin.rollouts.sglang.model import SGLangModel
from verl_sync_plugin.trainers.base import dtype_name
from verl_sync_plugin.trainers.fsdp2 import even_chunks
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Coverage, Manifest
from verl_sync_plugin.verify.destination import DestinationCheck, refuse_changed
from verl_sync_plugin.verify.hashes import HashCheck, paired
from verl_sync_plugin.verify.narrowed import narrowed_sums
from verl_sync_plugin.verify.uses import UseCheck

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
        bases = tuple(self._base(names, tensor) for names, tensor in _together(weights))
        self.plan: Plan = plan_buckets(bases, bucket_bytes, sharded)
        self._packers = [Packer(CPU, self.plan, rank, hashed=True, finite=False) for rank in range(ranks)]
        known, manifest = SGLangModel(model, dist.get_rank()), Manifest.of(self.plan)
        self._known = known
        self._key = LayoutKey(known)
        self.unpacker = Unpacker(known, manifest, CPU)
        self.proof = DestinationProof(known, manifest, CPU)
        self.coverage = Coverage(0, ())
        self.agreement = Agreement(60.0)
        self.check = HashCheck(self.agreement)
        self.destination = DestinationCheck(self.agreement)
        self.uses = UseCheck(self.agreement, range(dist.get_world_size()))

    def _base(self, names: tuple[str, ...], tensor: torch.Tensor) -> Base:
        lengths = even_chunks(tensor.shape[0], self._ranks, tensor.numel() // tensor.shape[0])
        views = tuple(View(name, tuple(tensor.shape), 0, tensor.numel()) for name in names)
        return Base(names[0], dtype_name(tensor.dtype), tensor.element_size(), lengths, views)

    def _shards(self, weights: models.Weights, rank: int) -> list[Shard]:
        shards = []
        for base, (_, tensor) in zip(self.plan.bases, _together(weights), strict=True):
            run = tensor.reshape(-1)[sum(base.lengths[:rank]) :][: base.lengths[rank]]
            shards.append(Shard(base, lambda run=run: run))  # type: ignore[misc]
        return shards

    def sync(
        self,
        weights: models.Weights,
        spoil: Callable[[torch.Tensor], None] = lambda memory: None,
        behind: Callable[[], None] = lambda: None,
    ) -> tuple[int, int]:
        """One sync into memory that holds rubbish; returns what was replayed.

        Args:
            weights: what is sent.
            spoil: is given every bucket between its packing and its load.
            behind: is called between the last copy and the proof of what the parameters hold.
        """
        models.poison(self.model)
        self._sent = [self._shards(weights, rank) for rank in range(self._ranks)]
        for packer in self._packers:
            packer.begin()
        self.unpacker.begin(self._key.now(), True, hashed=True, whole=self.check.whole(self.plan))
        if self.uses.asks(self.plan):
            self.uses.note(self.unpacker.uses.use(loaded=False))
            self.uses.compare(self.plan, loaded=False)
        ledger = Ledger(self.model) if self.unpacker.watched else None
        self.proof.begin(self.unpacker.layout)
        if self.verified:
            self.proof.prepare(self.unpacker.recording)
            self.unpacker.trust(self.proof.judge)
        with ledger or nullcontext(), self.unpacker.uses.watching():
            self._transfer(spoil)
        replayed = self.unpacker.replayed
        self._compare()
        self.unpacker.finish(ledger)
        refuse_rearranged(self._known, CPU)
        if ledger is not None:
            self.coverage = ledger.coverage()
            if not self.coverage.missing:  # as the session decides
                self.unpacker.accepted()
        if self.uses.note(self.unpacker.uses.news()) or self.uses.asks(self.plan):
            self.uses.compare(self.plan, loaded=True)
        behind()
        if self.verified:
            self._verify()
        return replayed

    def _transfer(self, spoil: Callable[[torch.Tensor], None]) -> None:
        slots = [torch.zeros(self.plan.slot_bytes, dtype=torch.uint8)]
        slots += [slots[0].clone() for _ in range(self._ranks - 1)] if self.plan.sharded else []
        for index in range(len(self.plan.buckets)):
            for rank, packer in enumerate(self._packers):
                packer.pack(index, slots[rank % len(slots)], self._sent[rank])
            spoil(slots[0])
            self.unpacker.load(index, slots)
            for slot in slots:
                slot.fill_(0xEE)  # used again

    def _verify(self) -> None:
        """What the parameters hold, as the trainer ranks compare it."""
        proven = self.proof.proven(always=not self.destination.knows(self.plan))
        self.proof.told(proven)
        news = self.destination.note(proven, self.plan)
        with self.agreement.attempt():
            refuse_changed(proven)
        if self.agreement.settle("verifying", waiting=news):
            self.destination.learn(self.plan, proven, sent_by=dist.get_world_size())
        sent = torch.stack([packer.sums() for packer in self._packers]).sum(0)
        for number in self.destination.narrowed:
            sent[number] = sum(rounded[number] for rounded in self._rounded())
        self.destination.compare(sent, proven)

    def _rounded(self) -> list[torch.Tensor]:
        dtypes = self.destination.narrowed
        return [narrowed_sums(self.plan, rank, self._sent[rank], dtypes) for rank in range(self._ranks)]

    def _compare(self) -> None:
        """The hashes, as the trainer ranks compare them; every model rank holds all packers, as many as its world."""
        readings = self.unpacker.readings(always=False)
        if readings is not None:
            self.unpacker.told(readings)
            self.check.note(Committed(self.coverage, readings=readings))
            self.check.learn(self.plan, sent_by=dist.get_world_size())
        sent = torch.stack([packer.sums() for packer in self._packers]).sum(0)
        self.check.compare(paired(sent, Committed(self.coverage, sums=self.unpacker.sums())))


def _together(weights: models.Weights) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    found: dict[int, tuple[tuple[str, ...], torch.Tensor]] = {}
    for name, tensor in weights:
        names, _ = found.get(id(tensor), ((), tensor))
        found[id(tensor)] = (*names, name), tensor
    return list(found.values())
