# SPDX-License-Identifier: Apache-2.0
"""The plan of a run's syncs: made by every rank, compared between them, kept while the trainer's layout stays."""

from __future__ import annotations

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.delivery.sharded import Sharded
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

    def agree(self, source: ParameterSource, bucket_bytes: int, sharded: Sharded) -> tuple[Plan, list[Shard]]:
        """Collective over the trainer ranks.

        Args:
            source: what is read, and plans.
            bucket_bytes: what the user sets.
            sharded: decides, once the source knows its group, whether plans are sharded.

        Returns:
            The plan and all shards of this rank.

        Raises:
            SyncError: a rank could not plan, or planned something else; the same text on every rank.
        """
        shards: list[Shard] = []
        if sharded.possible is None:
            shards = self._agreement.step("reading the shards", source.shards)
            sharded.decide(source.group)

        def changed() -> bool:
            shards.extend([] if shards else source.shards())
            plan = self._make(source, shards, slot_limit(bucket_bytes), bool(sharded.possible))
            return plan.digest != self.agreed_digest

        if self._agreement.any("planning the sync", changed):
            digest, self.agreed_digest = self.ready().digest, ""
            self._agreement.same_on_all("the tensors to sync (plan digest)", digest)
            self.agreed_digest = digest
        return self.ready(), shards

    def _make(self, source: ParameterSource, shards: list[Shard], limit: int, sharded: bool) -> Plan:
        bases = tuple(shard.base for shard in shards)
        if self.plan is None or self.plan.bases != bases or self.plan.sharded != sharded:
            self.plan = source.plan(bases, limit, sharded)
        return self.plan

    def ready(self) -> Plan:
        """The plan, once all ranks have settled on it."""
        assert self.plan is not None, "no plan before the ranks have settled"
        return self.plan
