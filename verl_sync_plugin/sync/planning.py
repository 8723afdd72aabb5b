# SPDX-License-Identifier: Apache-2.0
"""The plan of a run's syncs: made by every rank, compared between them, kept while the trainer's layout stays."""

from __future__ import annotations

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.delivery.reach import Reach
from verl_sync_plugin.sync.sender import slot_limit
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement


class Planning:
    """Keeps one plan.

    Args:
        agreement: where ranks settle.

    Attributes:
        plan: what this rank planned last; ``None`` before the first time.
        agreed_digest: of the plan that all ranks have; empty when there is none.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self.plan: Plan | None = None
        self.agreed_digest = ""

    def agree(self, source: ParameterSource, bucket_bytes: int, reach: Reach) -> tuple[Plan, list[Shard]]:
        """Collective over the trainer ranks.

        Args:
            source: what is read, and plans.
            bucket_bytes: what the user sets.
            reach: decides, once the source knows its group, whether plans are sharded.

        Returns:
            The plan and all shards of this rank.

        Raises:
            SyncError: a rank could not plan, or planned something else; the same text on every rank.
        """
        shards: list[Shard] = []
        if reach.possible is None:
            shards = self._agreement.step("reading the shards", source.shards)
            reach.decide(source.group)

        def changed() -> bool:
            shards.extend([] if shards else source.shards())
            plan = self._make(source, shards, slot_limit(bucket_bytes), reach)
            return plan.digest != self.agreed_digest

        if self._agreement.any("planning the sync", changed):
            digest, self.agreed_digest = self.ready().digest, ""
            self._agreement.same_on_all("the tensors to sync (plan digest)", digest)
            self.agreed_digest = digest
        return self.ready(), shards

    def _make(self, source: ParameterSource, shards: list[Shard], limit: int, reach: Reach) -> Plan:
        bases = tuple(shard.base for shard in shards)
        layout = bool(reach.possible), reach.held if reach.possible else 1
        if self.plan is None or self.plan.bases != bases or (self.plan.sharded, self.plan.held) != layout:
            self.plan = source.plan(bases, limit, *layout)
        return self.plan

    def ready(self) -> Plan:
        """The plan, once all ranks have settled on it."""
        assert self.plan is not None, "no plan before the ranks have settled"
        return self.plan
