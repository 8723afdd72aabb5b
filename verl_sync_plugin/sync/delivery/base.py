# SPDX-License-Identifier: Apache-2.0
"""What every way of delivery does for a sync, in the order in which it is asked for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.delivery.reach import Reach
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.trainers.base import ParameterSource, name_culprit, rank_in
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Used


class PeersUnreachableError(RuntimeError):
    """An engine rank cannot read the memory of other trainer ranks; the same text on every rank."""


@dataclass(frozen=True, eq=False)
class Sync:
    """One sync on its way, of which all ranks have agreed on the plan.

    Attributes:
        sync_id: names it between trainer and engine ranks.
        plan: what travels, in which buckets.
        source: what prepares the shards.
        shards: all shards of this rank, by base index.
        report: gets the stages.
        senders: the ranks whose segments make up a bucket for the engine rank beside this one, in their order.
        readers: the ranks beside the engine ranks that read this rank's segment.
        verified: what lies in the engine's parameters is to be compared with what is sent.
        keeps_staging: staging memory stays for the next sync.
    """

    sync_id: str
    plan: Plan
    source: ParameterSource
    shards: list[Shard]
    report: SyncReport
    senders: tuple[int, ...]
    readers: tuple[int, ...]
    verified: bool = False
    keeps_staging: bool = True

    @property
    def rank(self) -> int:
        """This rank's place among the owners of a sharded base."""
        return rank_in(self.source.group)


@dataclass(frozen=True)
class Offer:
    """What one rank says of one way of delivery.

    Attributes:
        obstacle: why this sync cannot go that way, for the log; empty when it can.
        early: the engine rank has not yet said whether it can; or this rank has failed, and says why when it settles.
        lasting: the obstacle stays for the rest of the run.
        unready: ``Delivery.stage`` has to be called first.
    """

    obstacle: str = ""
    early: bool = False
    lasting: bool = False
    unready: bool = False

    @property
    def flags(self) -> tuple[int, int, int, int]:
        """What the ranks add up."""
        return int(bool(self.obstacle)), int(self.early), int(self.lasting), int(self.unready)


@dataclass(frozen=True)
class Questions:
    """What an engine rank is to do beside loading.

    Attributes:
        hashed: whether hashes are compared.
        whole: numbers of the tensors that it is to hash whole.
        tell_use: it is to tell which bytes its model uses before anything is loaded.
        prove: it is to tell, behind its commit, what lies in its parameters.
    """

    hashed: bool
    whole: tuple[int, ...] = ()
    tell_use: bool = False
    prove: bool = False


class Delivery(ABC):
    """One way in which bytes come from the trainer ranks to the engine ranks.

    Lives as long as the run. For each sync the ranks ask all ways for their offer, choose one of them, and call, all
    ranks together: ``stage`` if any rank is unready, ``fill``, ``greet``, ``run`` and ``close``.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: packs, and speaks to the engine rank.
        own: where the trainer's ranks settle among themselves; the same as ``agreement`` where every rank has an engine
            rank beside it.
        reach: which memory engine ranks can read; its plans are those of the syncs.
    """

    name: ClassVar[str]  # in ``custom.sync.delivery``
    in_place: ClassVar[bool] = False  # nothing is staged: engine ranks read the trainer's own tensors

    def __init__(
        self,
        config: SyncConfig,
        agreement: Agreement,
        sender: BucketSender,
        own: Agreement | None = None,
        reach: Reach | None = None,
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._sender = sender
        self._own = own or agreement
        self._reach = reach or Reach(config, agreement)
        ranks = agreement.ranks
        self._me, self._packs, self._loads = ranks.rank, ranks.rank in ranks.trainers, ranks.rank in ranks.rollouts

    @property
    def _apart(self) -> bool:
        """Whether trainer and rollout share no process: a rank then packs, or has an engine rank load."""
        return not (self._packs and self._loads)

    def _pack_all(self, sync: Sync, number: int = 0) -> None:
        """Makes ready to pack or read all buckets; hashed also where only what arrives in the end is compared.

        Args:
            sync: the one under way.
            number: which of the segments in this rank's slot is its own.
        """
        self._sender.begin(sync.plan, sync.rank, True, True, number)

    @abstractmethod
    def offer(self, sync: Sync) -> Offer:
        """Whether this rank could deliver a sync this way. Not collective."""

    @abstractmethod
    def stage(self, sync: Sync) -> None:
        """Collective: tells the ranks of the group where the engine ranks find the bytes.

        Raises:
            SyncError: any rank's memory is too small or cannot be shared.
        """

    @abstractmethod
    def fill(self, sync: Sync) -> None:
        """Collective: starts to bring the first bytes into place; the engine may still be asleep.

        Raises:
            SyncError: any rank failed.
        """

    @abstractmethod
    def greet(self, sync: Sync, questions: Questions) -> Used | None:
        """Collective: opens the sync with the engine rank beside this rank, whose channel the sender has adopted.

        Returns:
            What the engine rank told about the use of the tensors; ``None`` when it was not asked, or this rank failed.

        Raises:
            PeersUnreachableError: an engine rank cannot read other trainer ranks' memory; nothing was loaded.
            SyncError: any rank failed.
        """

    @abstractmethod
    def run(self, sync: Sync) -> None:
        """Collective: hands everything over; when it returns, no engine rank reads any of it any more.

        Raises:
            SyncError: any rank failed.
        """

    def note(self, committed: Committed | None, plan: Plan) -> None:  # noqa: B027  (most ways learn nothing)
        """Takes in what the engine rank said at the end of a sync, however that was delivered; ``None`` where there is
        no engine rank beside this rank."""

    @abstractmethod
    def close(self, sync: Sync) -> None:
        """Gives back what is not kept until the next sync: all engine ranks have committed this one, or failed to. Not
        collective."""

    @abstractmethod
    def fall_back(self, error: PeersUnreachableError) -> None:
        """The next offer of this way has an obstacle.

        Raises:
            SyncError: ``custom.sync.delivery`` asks for this way by name.
        """

    def _settle_reach(self, what: str, unreachable: str) -> None:
        """Collective: raises PeersUnreachableError on all ranks when an engine rank cannot reach what it is to read.

        Args:
            what: the step, for messages.
            unreachable: why the engine rank beside this one cannot; empty when it can.
        """
        if self._agreement.settle(what, waiting=bool(unreachable)):
            texts = self._agreement.gather("asking why memory is out of reach", unreachable)
            raise PeersUnreachableError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    def _wait(self, sync: Sync, index: int) -> None:
        """Waits until the engine rank has loaded a bucket; a rank that has failed, or none beside it, waits for
        nothing."""
        if self._agreement.failed or not self._loads:
            return
        with sync.report.stage("wait_engine"):
            loaded = self._sender.wait_loaded(index)
        sync.report.note_stage("engine_load", loaded.started, loaded.seconds)

    def _load(self, sync: Sync, index: int, slot: int) -> None:
        """Tells the engine rank beside this one, if there is one, that a slot is ready."""
        sync.report.handed_over = (sync.plan, index)
        if self._loads:
            self._sender.load(index, slot)

    def _end(self, sync: Sync) -> None:
        """The last word before the commit, so that the engine does not generate from a NaN that it was given."""
        self._agreement.step("loading the last buckets", lambda: self._check_finite(sync))

    def _check_finite(self, sync: Sync) -> None:
        buckets = [sync.plan.buckets[index] for index in self._sender.broken()] if self._packs else []
        if not buckets:
            return
        named = (name_culprit(bucket, sync.shards, sync.source, sync.rank) for bucket in buckets)
        culprit = next(filter(None, named), None)
        if culprit is None:
            names = [entry.name for entry in buckets[0].entries]
            culprit = f"one of {names[:5]} was NaN or Inf when it was packed, and in the trainer all of them are finite"
        raise ValueError(
            f"parameter {culprit}; the engine was not released to generate from it. Look at the last optimizer step "
            "(loss, gradient norm, learning rate)"
        )
