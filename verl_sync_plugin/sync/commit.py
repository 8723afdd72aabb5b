# SPDX-License-Identifier: Apache-2.0
"""What is proven about a sync: before it, that the engine uses every byte; at its end, what the engine ranks did."""

from __future__ import annotations

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.endpoint import PendingLoad, RolloutEndpoint
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import Questions, Sync, Way, Ways
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.proof import Proven
from verl_sync_plugin.transport.protocol import Used
from verl_sync_plugin.verify.cadence import Cadence
from verl_sync_plugin.verify.coverage import check_coverage
from verl_sync_plugin.verify.destination import DestinationCheck, refuse_changed
from verl_sync_plugin.verify.hashes import HashCheck, paired
from verl_sync_plugin.verify.narrowed import made_on_the_way, narrowed_sums
from verl_sync_plugin.verify.uses import UseCheck


class Commit:
    """Collective over the trainer ranks.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: speaks to the engine rank.
        ways: hear what the engine rank can do in the next sync.
        endpoint: the engine.
    """

    def __init__(
        self,
        config: SyncConfig,
        agreement: Agreement,
        sender: BucketSender,
        ways: Ways,
        endpoint: RolloutEndpoint,
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._sender = sender
        self._ways = ways
        self._endpoint = endpoint
        self._hashes = HashCheck(agreement)
        self._uses = UseCheck(agreement, endpoint.ranks)
        self._destination = DestinationCheck(agreement)
        self._cadence = Cadence(config.verify)
        self._told_of_coverage = False

    def due(self, plan: Plan) -> bool:
        """Whether the next sync of a plan is to be verified; the same on all ranks of a trainer."""
        return self._cadence.due(plan.digest)

    def questions(self, sync: Sync, delivery: Way) -> Questions:
        """What the engine ranks are asked to do in a sync beside loading; the same on all ranks.

        An engine rank that reads in place has told before what it uses.
        """
        asks = self._uses.asks(sync.plan) and not delivery.in_place
        return Questions(True, self._hashes.whole(sync.plan), asks, sync.verified)

    def opened(self, plan: Plan, used: Used | None, questions: Questions, layers: int = 0) -> dict[str, torch.dtype]:
        """Refuses, before anything is loaded, a plan of which the engine leaves something out.

        Args:
            plan: what is to be sent.
            used: what the engine rank said that its model uses.
            questions: what it was asked.
            layers: see ``UseCheck.compare``.

        Returns:
            See ``UseCheck.compare``.

        Raises:
            SyncError: it does; names the tensors, the same text on every rank.
        """
        if not questions.tell_use:
            return {}
        self._uses.note(used)
        return self._uses.compare(plan, loaded=False, layers=layers)

    async def run(self, sync: Sync, delivery: Way, pending: PendingLoad | None) -> None:
        """Has the engine ranks finish, compares hashes, checks coverage both ways and waits for the engine's answer.

        Args:
            sync: whose bytes have been loaded; its report gets what the engine rank did.
            delivery: how they came.
            pending: the leader's load.

        Raises:
            SyncError: any rank failed, or bytes changed on the way; the same text on every rank.
        """
        sums, news, proven = torch.empty(0), False, None
        with self._agreement.attempt():
            if not self._agreement.failed:
                delivery.check_finite(sync)
                sums, news = self._ask(sync, delivery)
                proven = self._ask_for_proof(sync)
                news = news or (sync.verified and not self._destination.knows(sync.plan))
        # Before waiting for the engine's answer: it gives none while one of its ranks waits for us to hang up
        try:
            news = self._agreement.settle("committing", waiting=news)
        except BaseException:
            # An engine rank tells once what it uses, reads and holds; of this sync that may not have come
            for check in (self._uses, self._hashes, self._destination):
                check.forget()
            raise
        finally:
            with self._agreement.attempt():
                delivery.close(sync)
        if news:
            self._uses.compare(sync.plan, loaded=True)
            self._hashes.learn(sync.plan)
        with self._agreement.attempt():
            await self._answered(sync, pending)
        self._hashes.compare(sums)
        sync.report.hashed_tensors = sync.plan.tensor_count
        if sync.verified:
            self._verify(sync, proven, news)
        self._cadence.note(sync.plan.digest, whole=not (sync.verified and self._destination.no_room))

    def _ask(self, sync: Sync, delivery: Way) -> tuple[torch.Tensor, bool]:
        """Has the engine rank commit; returns both sides' hashes, and whether it told anything that the ranks have to
        exchange."""
        plan = sync.plan
        if not self._endpoint.ranks:  # no engine rank beside this one
            self._ways.in_place.note(None, plan)
            return paired(self._sender.sums(plan), None), self._uses.asks(plan) or not self._hashes.knows(plan)
        tell = not self._hashes.knows(plan) or (sync.verified and not self._destination.knows(plan))
        committed = self._sender.commit(tell, unmap=not sync.keeps_staging)
        self._ways.in_place.note(committed, plan)
        unlearned, told = self._hashes.note(committed), self._uses.note(committed.used)
        news = told or self._uses.asks(plan) or unlearned
        sums = paired(self._sender.sums(plan), committed)
        sync.report.note(committed, plan, delivery.in_place)
        first, self._told_of_coverage = not self._told_of_coverage, True
        restores, layers = self._endpoint.restores_uncovered, self._uses.layers
        check_coverage(committed.coverage, restores, first, plan.names, layers)
        return sums, news

    def _ask_for_proof(self, sync: Sync) -> Proven | None:
        """What the engine rank beside this rank holds, where it was asked for that."""
        if not sync.verified or not self._endpoint.ranks:
            return None
        with sync.report.stage("verify"):
            proven = self._sender.proven()
        self._destination.note(proven, sync.plan)
        refuse_changed(proven)
        return proven

    def _verify(self, sync: Sync, proven: Proven | None, news: bool) -> None:
        """Collective: compares what the engine ranks hold with what was sent."""
        if news:
            made: frozenset[int] = frozenset()
            with self._agreement.attempt():
                made = made_on_the_way(sync.plan, sync.rank, sync.shards, sync.source.makes_all)
            self._destination.learn(sync.plan, proven, made)
        self._destination.refuse_unproven(self._config.verify)
        sums = torch.empty(0)
        with self._agreement.attempt():
            sums = self._narrowed(sync, self._sender.sums(sync.plan))
        self._destination.compare(sums, proven)
        sync.report.verified_tensors = len(self._destination.compared)
        sync.report.not_comparable = len(self._destination.left_out)
        sync.report.no_room = self._destination.no_room
        sync.report.verified_bytes = proven.nbytes if proven is not None else 0

    def _narrowed(self, sync: Sync, sums: torch.Tensor) -> torch.Tensor:
        """The hashes of what this rank packed, in the engine's dtype where that is narrower."""
        dtypes = self._destination.narrowed
        if not dtypes or not sync.shards or sync.source.makes_all:
            return sums
        rounded = narrowed_sums(sync.plan, sync.rank, sync.shards, dtypes)
        return torch.where(torch.isin(torch.arange(len(sums)), torch.tensor(list(dtypes))), rounded, sums)

    async def _answered(self, sync: Sync, pending: PendingLoad | None) -> None:
        if pending is not None:
            outcome = await pending.outcome(self._config.timeout_seconds)
            sync.report.stages = {"sleep": outcome.sleep_seconds, **sync.report.stages}
