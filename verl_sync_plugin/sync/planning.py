# SPDX-License-Identifier: Apache-2.0
"""The plan of a run's syncs: made by every rank, compared between them, kept while the trainer's layout stays."""

from __future__ import annotations

from verl_sync_plugin.layout.tensors import Plan, Shard
from verl_sync_plugin.sync.sender import slot_limit
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement


class Planning:
    """Keeps one plan.

    Attributes:
        plan: what this rank planned last; ``None`` before the first time.
        agreed_digest: of the plan that all ranks have; empty when there is none.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.agreed_digest = ""

    def make(self, source: ParameterSource, shards: list[Shard], bucket_bytes: int, sharded: bool) -> Plan:
        """Plans anew if anything has changed. Not collective.

        Args:
            source: whose the shards are.
            shards: all of this rank.
            bucket_bytes: what the user sets.
            sharded: see ``Plan``.
        """
        bases = tuple(shard.base for shard in shards)
        if self.plan is None or self.plan.bases != bases or self.plan.sharded != sharded:
            self.plan = source.plan(bases, slot_limit(bucket_bytes), sharded)
        return self.plan

    @property
    def changed(self) -> bool:
        """True if other ranks may have another plan."""
        return self.ready().digest != self.agreed_digest

    def compare(self, agreement: Agreement) -> None:
        """Collective, where any rank's plan has changed.

        Raises:
            SyncError: a rank planned something else; the same text on every rank.
        """
        self.agreed_digest = ""
        agreement.same_on_all("the tensors to sync (plan digest)", self.ready().digest)
        self.agreed_digest = self.ready().digest

    def ready(self) -> Plan:
        """The plan, once there is one."""
        assert self.plan is not None, "made before"
        return self.plan
