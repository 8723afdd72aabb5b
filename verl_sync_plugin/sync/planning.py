"""The plan of a run's syncs: made by every rank, compared between them, kept while the trainer's layout stays."""

from __future__ import annotations

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.delivery.shared import Delivery
from verl_sync_plugin.sync.sender import BucketSender, slot_limit
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement


class Planning:
    """Keeps one plan, and on demand staging memory fit for it.

    Args:
        agreement: where ranks settle.
        sender: owns the staging memory.
        delivery: decides whether plans are sharded, and tells the ranks each other's staging memory.
    """

    def __init__(self, agreement: Agreement, sender: BucketSender, delivery: Delivery) -> None:
        self._agreement = agreement
        self._sender = sender
        self._delivery = delivery
        self.plan: Plan | None = None
        self.agreed_digest = ""
        self._staged = ""

    def agree(self, source: ParameterSource, shards: list[Shard], bucket_bytes: int) -> Plan:
        """Collective over the trainer ranks.

        Args:
            source: what plans.
            shards: all of this rank.
            bucket_bytes: what the user sets.

        Raises:
            SyncError: a rank could not plan, or planned something else; the same text on every rank.
        """
        if not self._delivery.decided:
            self._delivery.decide(source.group)
        changed = True
        with self._agreement.attempt():
            if not self._agreement.failed:  # else the shards are none
                changed = self._make(source, shards, bucket_bytes).digest != self.agreed_digest
        if self._agreement.settle("planning the sync", waiting=changed):
            digest = self.ready().digest
            self.agreed_digest = ""
            self._agreement.same_on_all("the tensors to sync (plan digest)", digest)
            self.agreed_digest = digest
        return self.ready()

    def _make(self, source: ParameterSource, shards: list[Shard], bucket_bytes: int) -> Plan:
        bases, sharded = tuple(shard.base for shard in shards), self._delivery.sharded
        if self.plan is None or self.plan.bases != bases or self.plan.sharded != sharded:
            self.plan = source.plan(bases, slot_limit(bucket_bytes), sharded)
        return self.plan

    @property
    def unstaged(self) -> bool:
        """Whether ``stage`` is still to come for the plan, or was undone."""
        return self._staged != self.ready().digest or not self._sender.staged

    def stage(self, source: ParameterSource) -> None:
        """Collective: makes staging memory for the plan, and tells the engine ranks where.

        Raises:
            SyncError: a rank has not enough memory, or cannot share it; the same text on every rank.
        """
        self._staged = ""  # what was there is gone even if this fails
        with self._agreement.attempt():
            self._sender.reserve(self.ready())
        self._delivery.exchange(self._sender, source.group)
        self._staged = self.ready().digest

    def ready(self) -> Plan:
        """The plan, once all ranks have settled on it."""
        assert self.plan is not None, "no plan before the ranks have settled"
        return self.plan
