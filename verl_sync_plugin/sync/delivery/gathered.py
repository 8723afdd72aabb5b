"""One sync's buckets on their way to the engine, gathered on every rank.

Neither side waits for its own copies before it starts the next ones: while one bucket is handed over, those after it
are being packed and gathered and the one before it is being loaded. A slot is refilled only after the engine has said
that its copies out of it have completed.
"""

from __future__ import annotations

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.sender import SLOTS, BucketSender
from verl_sync_plugin.trainers.base import ParameterSource, rank_in
from verl_sync_plugin.trainers.culprit import name_culprit
from verl_sync_plugin.transport.agreement import Agreement


class BucketStream:
    """All methods are collective over the trainer ranks.

    Args:
        agreement: where ranks settle.
        sender: reserved for the plan and begun.
        plan: the buckets.
        shards: all shards of this rank, by base index.
        source: what prepares them.
        report: gets the stages.
    """

    def __init__(
        self,
        agreement: Agreement,
        sender: BucketSender,
        plan: Plan,
        shards: list[Shard],
        source: ParameterSource,
        report: SyncReport,
    ) -> None:
        self._agreement = agreement
        self._sender = sender
        self._plan = plan
        self._shards = shards
        self._source = source
        self._report = report
        self.rank = rank_in(source.group)

    def fill_ahead(self) -> None:
        """Fills all slots; may run before the engine is there.

        Raises:
            SyncError: any rank failed.
        """
        for index in range(min(SLOTS, len(self._plan.buckets))):
            self._fill(index)

    def run(self) -> None:
        """Hands all buckets over, after ``fill_ahead``, and waits until the engine has loaded them.

        Raises:
            SyncError: any rank failed.
        """
        count = len(self._plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                with self._report.stage("gather"):
                    self._sender.drain(index % SLOTS)
                self._sender.load(index, index % SLOTS)
            with self._agreement.attempt():
                if index > 0:
                    self._wait(index - 1)
            if 0 < index <= count - SLOTS:
                self._fill(index + SLOTS - 1)
        with self._agreement.attempt():
            if count:
                self._wait(count - 1)
        self._end()

    def _end(self) -> None:
        with self._agreement.attempt():
            if not self._agreement.failed:  # else the device may hang, and the check waits for it
                self._check_finite()
        self._agreement.settle("loading the last buckets")

    def _fill(self, index: int) -> None:
        """Starts to bring one bucket into its slot."""
        bucket, slot = self._plan.buckets[index], index % SLOTS
        what = f"packing bucket {index + 1} of {len(self._plan.buckets)}"
        if type(self._source).prepare is not ParameterSource.prepare:
            with self._report.stage("prepare"):
                ahead = [later.bases for later in self._plan.buckets[index + 1 :]]
                self._agreement.run(what, self._source.prepare(bucket.bases, ahead))
        with self._agreement.attempt(), self._report.stage("pack"):
            self._sender.pack(index, slot, self._shards)
        self._send_off(index)

    def _send_off(self, index: int) -> None:
        self._agreement.settle(f"packing bucket {index + 1} of {len(self._plan.buckets)}")
        with self._agreement.attempt(), self._report.stage("gather"):
            self._sender.gather(self._plan.buckets[index], index % SLOTS, self.rank, self._source.group)

    def _check_finite(self) -> None:
        """Before the commit, so the engine does not generate from what it was given."""
        buckets = [self._plan.buckets[index] for index in self._sender.broken()]
        if not buckets:
            return
        named = (name_culprit(bucket, self._shards, self._source, self.rank) for bucket in buckets)
        culprit = next(filter(None, named), None)
        if culprit is None:
            names = [entry.name for entry in buckets[0].entries]
            culprit = f"one of {names[:5]} was NaN or Inf when it was packed, and in the trainer all of them are finite"
        raise ValueError(
            f"parameter {culprit}; the engine was not released to generate from it. Look at the last optimizer "
            f"step (loss, gradient norm, learning rate), or set {KEY_PREFIX}.check_finite=False to sync it anyway"
        )

    def _wait(self, index: int) -> None:
        if self._agreement.failed:
            return
        with self._report.stage("wait_engine"):
            seconds = self._sender.wait_loaded(index)
        self._report.stages["engine_load"] = self._report.stages.get("engine_load", 0.0) + seconds
