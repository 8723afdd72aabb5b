# SPDX-License-Identifier: Apache-2.0
"""What all deliveries but direct share: buckets are packed into staging memory, from which engine ranks read them.

Neither side waits for its own copies before it starts the next ones: while one bucket is handed over, those after it
are being packed and the one before it is being loaded. A slot is refilled only after the engine has said that its
copies out of it have completed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from verl_sync_plugin.sync.delivery.base import Delivery, Offer, Questions, Sync
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.transport.memory.exports import StagingExport
from verl_sync_plugin.transport.protocol import NONE, Hello, Used


class Staged(Delivery):
    """See ``Delivery``; ``run`` and what becomes of a packed bucket are the subclasses'."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._staged = ""  # digest of the plan that the staging memory is for
        self._stagings: tuple[StagingExport, ...] = ()
        self._place = 0
        self._unopened = False  # the engine ranks have not opened these yet

    def offer(self, sync: Sync) -> Offer:
        missing = self._holds and not self._sender.staged
        return Offer(self._obstacle(sync), unready=self._staged != sync.plan.digest or missing)

    def _obstacle(self, sync: Sync) -> str:
        return ""

    @property
    def _holds(self) -> bool:
        """Whether this rank has slots."""
        return True

    @property
    def told(self) -> StagingExport:
        """What engine ranks are told of this rank's staging memory."""
        return self._stagings[self._place]

    def stage(self, sync: Sync) -> None:
        """Collective: makes staging memory for the plan; each rank hears of what the engine rank beside it will read.

        Raises:
            SyncError: a rank has not enough memory, or cannot share it; the same text on every rank.
        """
        self._staged = ""  # what was there is gone even if this fails
        sources = self._sources(sync)
        mine = self._agreement.step("sharing the staging memory", lambda: self._reserve(sync))
        alone = sources == (self._me,)
        everywhere = (
            self._agreement.gather("exchanging the staging memory", mine) if sync.plan.sharded else {self._me: mine}
        )
        assert sync.plan.sharded or alone, "what is not sharded is read from the rank beside"
        self._stagings = tuple(everywhere[rank][self._me] for rank in sources) if self._loads else ()
        self._place = self._place_in(sync, sources)
        self._unopened, self._staged = True, sync.plan.digest

    def _place_in(self, sync: Sync, sources: tuple[int, ...]) -> int:
        """See ``Hello.place``."""
        return place_of(self._me, sources)

    def _homes(self, sync: Sync) -> tuple[tuple[int, int], ...]:
        """See ``Hello.homes``."""
        return ()

    def _number(self, sync: Sync) -> int:
        """Which of the segments in this rank's slot is its own, where the plan is sharded."""
        return 0

    def _reserve(self, sync: Sync) -> dict[int, StagingExport]:
        if not self._holds:
            return {}
        self._sender.reserve(sync.plan)
        return {rank: self._sender.export(rank) for rank in self._readers(sync)}

    def _sources(self, sync: Sync) -> tuple[int, ...]:
        """The ranks whose staging memory the engine rank beside this one reads."""
        return (self._me,)

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        """The ranks whose engine ranks read this rank's staging memory."""
        return (self._me,)

    def fill(self, sync: Sync) -> None:
        """Fills all slots."""
        if not self._packs:
            return
        with self._agreement.attempt():
            self._pack_all(sync, self._number(sync))
        for index in range(min(SLOTS, len(sync.plan.buckets))):
            self._fill(sync, index)

    def _fill(self, sync: Sync, index: int) -> None:
        """A rank that packs starts to bring one bucket into its slot."""
        if not self._packs:
            return
        # Apart, an error of all trainer ranks is news for the rollout ranks
        with self._agreement.attempt() if self._apart else nullcontext():
            self._prepare(sync, index)
        with self._agreement.attempt(), sync.report.stage("pack"):
            self._sender.pack(index, index % SLOTS, sync.shards)
        self._packed(sync, index, self._what(sync, index))

    def _prepare(self, sync: Sync, index: int) -> None:
        """Collective over the trainer's ranks: what makes a bucket of which weights are made on the way."""
        if not sync.source.prepares:
            return
        what, buckets = self._what(sync, index), sync.plan.buckets
        if self._apart and self._agreement.failed:  # the others must not wait for this rank alone
            with self._own.attempt():
                raise RuntimeError("this rank has failed before")
        with sync.report.stage("prepare"):
            ahead = [later.bases for later in buckets[index + 1 :]]
            self._own.run(what, sync.source.prepare(buckets[index].bases, ahead))
            if self._apart:
                self._own.settle(what)

    def _what(self, sync: Sync, index: int) -> str:
        return f"packing bucket {index + 1} of {len(sync.plan.buckets)}"

    def _packed(self, sync: Sync, index: int, what: str) -> None:
        """Collective: a bucket is being packed into its slot."""

    def greet(self, sync: Sync, questions: Questions) -> Used | None:
        unreachable, used = "", None
        with self._agreement.attempt():
            if self._loads:
                does = (True, questions.hashed, questions.whole)
                sources = self._sources(sync)
                hello = Hello(
                    sync.sync_id, sync.plan.digest, self._stagings, self._place, *does,
                    tell_use=questions.tell_use, own=sources.index(self._me) if self._me in sources else NONE,
                    homes=self._homes(sync), prove=questions.prove,
                )  # fmt: skip
                unreachable, used = self._sender.greet(hello, sync.plan)
        if self._unopened:
            self._settle_reach("opening the staging memory", unreachable)
            self._sender.opened()
            self._unopened = False
        return used

    def close(self, sync: Sync) -> None:
        """Gives the staging memory back where the engine would lack it. By now all engine ranks have unmapped it, but
        for one that is gone."""
        if not sync.keeps_staging:
            self._sender.unstage()
            self._staged = ""


def place_of(rank: int, sources: tuple[int, ...]) -> int:
    """Which of the sources a rank's engine rank reads what all of them hold from: the one beside it; where none is, one
    of them, so that the ranks share them out."""
    return sources.index(rank) if rank in sources else rank % len(sources)
