# SPDX-License-Identifier: Apache-2.0
"""What gathered and sharded delivery share: buckets are packed into staging memory, from which engine ranks read them.

Neither side waits for its own copies before it starts the next ones: while one bucket is handed over, those after it
are being packed and the one before it is being loaded. A slot is refilled only after the engine has said that its
copies out of it have completed.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from verl_sync_plugin.sync.delivery.base import Delivery, Offer, Questions, Sync
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.transport.memory.exports import StagingExport
from verl_sync_plugin.transport.protocol import Hello, Used


class Staged(Delivery):
    """See ``Delivery``; ``run`` and what becomes of a packed bucket are the subclasses'."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._staged = ""  # digest of the plan that the staging memory is for
        self._stagings: tuple[StagingExport, ...] = ()
        self._place = 0
        self._unopened = False  # the engine ranks have not opened these yet

    def offer(self, sync: Sync) -> Offer:
        return Offer(self._obstacle(sync), unready=self._staged != sync.plan.digest or not self._sender.staged)

    def _obstacle(self, sync: Sync) -> str:
        return ""

    @property
    def told(self) -> StagingExport:
        """What engine ranks are told of this rank's staging memory."""
        return self._stagings[self._place]

    def stage(self, sync: Sync) -> None:
        """Collective: makes staging memory for the plan; each rank hears of that of the ranks it shares the model with.

        Raises:
            SyncError: a rank has not enough memory, or cannot share it; the same text on every rank.
        """
        self._staged = ""  # what was there is gone even if this fails
        ranks, me = self._readers(sync), dist.get_rank()
        mine = self._agreement.step("sharing the staging memory", lambda: self._reserve(sync, ranks))
        everywhere = self._agreement.gather("exchanging the staging memory", mine) if sync.plan.sharded else {me: mine}
        self._stagings, self._place = tuple(everywhere[rank][me] for rank in ranks), ranks.index(me)
        self._unopened, self._staged = True, sync.plan.digest

    def _reserve(self, sync: Sync, ranks: list[int]) -> dict[int, StagingExport]:
        self._sender.reserve(sync.plan)
        return {rank: self._sender.export(rank) for rank in ranks}

    def _readers(self, sync: Sync) -> list[int]:
        """The global ranks whose engine ranks read this rank's staging memory."""
        return [dist.get_rank()]

    def fill(self, sync: Sync) -> None:
        """Fills all slots."""
        with self._agreement.attempt():
            self._sender.begin(sync.plan, sync.rank, self._config.verify_hashes, self._config.check_finite)
        for index in range(min(SLOTS, len(sync.plan.buckets))):
            self._fill(sync, index)

    def _fill(self, sync: Sync, index: int) -> None:
        """Starts to bring one bucket into its slot."""
        buckets = sync.plan.buckets
        what = f"packing bucket {index + 1} of {len(buckets)}"
        if sync.source.prepares:
            with sync.report.stage("prepare"):
                ahead = [later.bases for later in buckets[index + 1 :]]
                self._agreement.run(what, sync.source.prepare(buckets[index].bases, ahead))
        with self._agreement.attempt(), sync.report.stage("pack"):
            self._sender.pack(index, index % SLOTS, sync.shards)
        self._packed(sync, index, what)

    def _packed(self, sync: Sync, index: int, what: str) -> None:
        """Collective: a bucket is being packed into its slot."""

    def greet(self, sync: Sync, questions: Questions) -> Used | None:
        unreachable, used = "", None
        with self._agreement.attempt():
            does = (self._config.copy_plan, questions.hashed, questions.whole)
            hello = Hello(
                sync.sync_id, sync.plan.digest, self._stagings, self._place, *does, tell_use=questions.tell_use
            )
            unreachable, used = self._sender.greet(hello, sync.plan)
        if self._unopened:
            self._settle_reach("opening the staging memory", unreachable)
            self._sender.opened()
            self._unopened = False
        return used
