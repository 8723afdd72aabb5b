"""The end of a sync: what the engine ranks did is proven and taken down, and the engine has answered."""

from __future__ import annotations

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.delivery.direct import Direct
from verl_sync_plugin.sync.endpoint import PendingLoad, RolloutEndpoint
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.verify.coverage import check_coverage
from verl_sync_plugin.verify.hashes import HashCheck, paired
from verl_sync_plugin.verify.uses import UseCheck


class Ending:
    """Collective over the trainer ranks.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: speaks to the engine rank.
        hashes: compares.
        uses: proves that the engine takes in everything, also where only its load could tell.
        direct: hears whether the engine rank can read parameters where they lie.
        endpoint: the engine.
    """

    def __init__(
        self,
        config: SyncConfig,
        agreement: Agreement,
        sender: BucketSender,
        hashes: HashCheck,
        uses: UseCheck,
        direct: Direct,
        endpoint: RolloutEndpoint,
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._sender = sender
        self._hashes = hashes
        self._uses = uses
        self._direct = direct
        self._endpoint = endpoint

    async def commit(self, plan: Plan, report: SyncReport, pending: PendingLoad | None, first: bool) -> None:
        """Has the engine ranks finish, compares hashes, checks coverage both ways and waits for the engine's answer.

        Args:
            plan: what was sent.
            report: gets what the engine rank did.
            pending: the leader's load.
            first: of the run; what is said once is said then.

        Raises:
            SyncError: any rank failed, or bytes changed on the way; the same text on every rank.
        """
        verify, sums, new = self._config.verify_hashes, torch.empty(0), False
        with self._agreement.attempt():
            committed = self._sender.commit(tell=verify and not self._hashes.knows(plan))
            self._direct.note(committed, plan)
            unlearned, told = self._hashes.note(committed), self._uses.note(committed.used)
            new = told or self._uses.asks(plan) or (verify and unlearned)
            if verify:
                sums = paired(self._sender.sums(), committed)
            report.note(committed, plan, self._direct.active)
            check_coverage(committed.coverage, self._config, self._endpoint.restores_uncovered, first, plan.names)
        # Before waiting for the engine's answer: it gives none while one of its ranks waits for us to hang up
        try:
            new = self._agreement.settle("committing", waiting=new)
        except BaseException:
            self._uses.forget()
            raise
        finally:
            if self._direct.active:
                # By now all engine ranks have unmapped it, also those that failed to commit; told of it again, they
                # would open an export for the second time
                with self._agreement.attempt():
                    self._sender.unstage()
        self._compare(plan, sums, new)
        with self._agreement.attempt():
            if pending is not None:
                outcome = await pending.outcome(self._config.timeout_seconds)
                report.stages = {"sleep": outcome.sleep_seconds, **report.stages}
        self._agreement.settle("ending the engine's update")

    def _compare(self, plan: Plan, sums: torch.Tensor, new: bool) -> None:
        """Collective: what the engine uses and which bytes it read, where any rank has ``new`` to tell, and hashes."""
        if new:
            self._uses.compare(plan, loaded=True)
        if self._config.verify_hashes:
            if new:
                self._hashes.learn(plan)
            self._hashes.compare(sums)
