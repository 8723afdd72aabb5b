# SPDX-License-Identifier: Apache-2.0
"""Proves a sync: before it, that the engine uses every byte; at its end, what the engine ranks did."""

from __future__ import annotations

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.load_map import LoadMap
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.endpoint import PendingLoad, RolloutEndpoint
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import Questions, Sync, Way, Ways
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed
from verl_sync_plugin.verify import Cadence, Comparison, refuse_changed


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
        self.comparison = Comparison(config, agreement, endpoint.ranks, endpoint.restores_uncovered)
        self._cadence = Cadence(config.verify)

    def due(self, plan: Plan) -> bool:
        """True if the next sync of a plan is to be verified; the same on all ranks of a trainer."""
        return self._cadence.due(plan.digest)

    def questions(self, sync: Sync, delivery: Way) -> Questions:
        """Asks the engine ranks in a sync; ``tells`` and ``proves`` are the same on all ranks.

        An engine rank that reads in place has said before what it does.
        """
        known = self.comparison.map.digest if self.comparison.map is not None else ""
        return Questions(not (self.comparison.knows(sync.plan) or delivery.in_place), sync.verified, known)

    def opened(self, plan: Plan, found: LoadMap | None, questions: Questions, layers: int = 0) -> dict[str, str]:
        """Refuses, before anything is loaded, a plan of which the engine leaves something out.

        Args:
            plan: what is to be sent.
            found: what the engine rank said that its model does.
            questions: what it was asked.
            layers: see ``Comparison.learn``.

        Returns:
            See ``Comparison.learn``; nothing where nothing was asked.

        Raises:
            SyncError: it does; names the tensors, the same text on every rank.
        """
        if not questions.tells:
            return {}
        self.comparison.note(found)
        return self.comparison.learn(plan, loaded=False, layers=layers)

    async def run(self, sync: Sync, delivery: Way, pending: PendingLoad | None) -> None:
        """Has the engine ranks finish, compares hashes and waits for the engine's answer.

        Args:
            sync: whose bytes have been loaded; its report gets what the engine rank did.
            delivery: how they came.
            pending: the leader's load.

        Raises:
            SyncError: any rank failed, or bytes changed on the way; the same text on every rank.
        """
        comparison, committed, news, weighed = self.comparison, None, False, torch.empty(0)
        with self._agreement.attempt():
            if not self._agreement.failed:
                delivery.check_finite(sync)
                committed = self._ask(sync, delivery)
                news = comparison.note(committed.map if committed else None) or not comparison.knows(sync.plan)
                if not news:
                    weighed = comparison.weighed(self._sender.sums(sync.plan), committed, sync.verified)
        # Before waiting for the engine's answer: it gives none while one of its ranks waits for us to hang up
        try:
            news = self._agreement.settle("committing", waiting=news)
        except BaseException:
            comparison.forget()  # what an engine rank tells once may not have come
            raise
        finally:
            with self._agreement.attempt():
                delivery.close(sync)
        if news:
            comparison.learn(sync.plan, loaded=True)
            with self._agreement.attempt():
                weighed = comparison.weighed(self._sender.sums(sync.plan), committed, sync.verified)
            self._agreement.settle("weighing what the engine holds")
        report = sync.report
        if sync.verified:
            comparison.refuse_unproven()
        with self._agreement.attempt():
            await self._answered(sync, pending)
        comparison.compare(weighed)
        report.hashed_tensors = sync.plan.tensor_count
        report.coverage_expected = comparison.map.kept if comparison.map is not None else 0
        report.coverage_missing = len(comparison.unwritten)
        if sync.verified:
            report.verified_tensors, report.not_comparable = len(comparison.compared), len(comparison.left_out)
            report.no_room = comparison.no_room
            report.verified_bytes = committed.held.nbytes if committed is not None and committed.held else 0
        self._cadence.note(sync.plan.digest, whole=not (sync.verified and comparison.no_room))

    def _ask(self, sync: Sync, delivery: Way) -> Committed | None:
        """Has the engine rank commit; ``None`` where this rank has none."""
        committed = self._sender.commit(not sync.keeps_staging) if self._endpoint.ranks else None
        self._ways.in_place.note(committed, sync.plan)
        if committed is not None:
            sync.report.note(committed, sync.plan, delivery.in_place)
            if committed.held is not None:
                refuse_changed(committed.held.changed)
        return committed

    async def _answered(self, sync: Sync, pending: PendingLoad | None) -> None:
        if pending is not None:
            outcome = await pending.outcome(self._config.timeout_seconds)
            sync.report.stages = {"sleep": outcome.sleep_seconds, **sync.report.stages}
