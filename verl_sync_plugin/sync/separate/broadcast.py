# SPDX-License-Identifier: Apache-2.0
"""Broadcast delivery: every trainer rank sends its segment of a bucket to all rollout ranks, each byte once.

Trainer and rollout ranks keep the same slots. A trainer rank packs its segment into a slot; one broadcast per segment,
from the rank that packed it, completes the slot everywhere; a rollout rank then has the engine rank beside it load the
slot, as in gathered delivery. Packing, sending and loading of successive buckets run at once. All ranks settle before
the broadcasts of a bucket, so a rank that has failed leaves nobody alone in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_sync_plugin.sync.delivery.base import Delivery, Offer, PeersUnreachableError, Questions, Sync
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.protocol import Hello, Used


@dataclass
class Route:
    """Who sends.

    Attributes:
        ranks: trainer and rollout ranks.
        senders: the rank that sends each segment of a bucket.
    """

    ranks: JointRanks
    senders: tuple[int, ...] = ()


class Broadcast(Delivery):
    """What both roles share; see ``Delivery``."""

    name = "broadcast"

    def __init__(self, *args: Any, route: Route) -> None:
        super().__init__(*args)
        self._route = route
        self._staged = ""  # digest of the plan that the slots are for

    def offer(self, sync: Sync) -> Offer:
        return Offer(unready=self._staged != sync.plan.digest or not self._sender.staged)

    def stage(self, sync: Sync) -> None:
        self._staged = ""
        self._agreement.step("making the staging memory", lambda: self._sender.reserve(sync.plan))
        self._staged = sync.plan.digest

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Never called for: an engine rank reads no memory but that of the rollout rank beside it."""
        raise AssertionError("broadcast delivery reads no peer's memory") from error

    def _send(self, sync: Sync, index: int) -> None:
        """Starts to complete a bucket's slot on all ranks; the bytes are there after ``drain``."""
        bucket = sync.plan.buckets[index]
        self._agreement.settle(f"packing bucket {index + 1} of {len(sync.plan.buckets)}")
        with self._agreement.attempt(), sync.report.stage("broadcast"):
            self._sender.broadcast(bucket, index % SLOTS, self._route.senders, self._route.ranks)


class FromTrainer(Broadcast):
    """A trainer rank's side: no engine rank is beside it.

    Args:
        own: among the trainer's ranks alone; where shards are prepared.
    """

    def __init__(self, *args: Any, route: Route, own: Agreement) -> None:
        super().__init__(*args, route=route)
        self._own = own

    def fill(self, sync: Sync) -> None:
        """Fills all slots with this rank's segments."""
        with self._agreement.attempt():
            self._sender.begin(sync.plan, sync.rank, self._config.verify_hashes, self._config.check_finite)
            for index in range(min(SLOTS, len(sync.plan.buckets))):
                self._fill(sync, index)

    def _fill(self, sync: Sync, index: int) -> None:
        buckets, own = sync.plan.buckets, self._own
        if not sync.source.prepares:
            with sync.report.stage("pack"):
                self._sender.pack(index, index % SLOTS, sync.shards)
            return
        what = f"preparing bucket {index + 1} of {len(buckets)}"
        with sync.report.stage("prepare"):
            own.run(what, sync.source.prepare(buckets[index].bases, [later.bases for later in buckets[index + 1 :]]))
        with own.attempt(), sync.report.stage("pack"):
            self._sender.pack(index, index % SLOTS, sync.shards)
        own.settle(what)  # the others do not wait in the next preparation for a rank that has failed

    def greet(self, sync: Sync, questions: Questions) -> Used | None:
        return None

    def run(self, sync: Sync) -> None:
        count = len(sync.plan.buckets)
        for index in range(count):
            with self._agreement.attempt(), sync.report.stage("drain"):
                self._sender.drain(index % SLOTS)
            self._send(sync, index)
            with self._agreement.attempt():
                if index + SLOTS < count:
                    self._fill(sync, index + SLOTS)
        with self._agreement.attempt():
            for slot in range(min(SLOTS, count)):
                self._sender.drain(slot)
        self._end(sync)


class ToRollout(Broadcast):
    """A rollout rank's side: it packs nothing, and has the engine rank beside it load what has come."""

    def fill(self, sync: Sync) -> None:
        """Nothing is there to be filled in."""

    def greet(self, sync: Sync, questions: Questions) -> Used | None:
        used = None
        with self._agreement.attempt():
            does = (self._config.copy_plan, questions.hashed, questions.whole)
            export = self._sender.export()
            hello = Hello(sync.sync_id, sync.plan.digest, (export,), 0, *does, tell_use=questions.tell_use)
            unreachable, used = self._sender.greet(hello, sync.plan)
            assert not unreachable, "the engine rank reads the slots of its own rollout rank only"
            self._sender.opened()
        return used

    def run(self, sync: Sync) -> None:
        """While one bucket is on its way, the one before it is loaded."""
        count = len(sync.plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                if index >= SLOTS:
                    self._wait(sync, index - SLOTS)
            self._send(sync, index)
            if index > 0:
                self._load(index - 1)
        if count:
            self._load(count - 1)
        with self._agreement.attempt():
            for index in range(max(count - SLOTS, 0), count):
                self._wait(sync, index)
        self._end(sync)

    def _load(self, index: int) -> None:
        with self._agreement.attempt():
            if not self._agreement.failed:
                self._sender.drain(index % SLOTS)
                self._sender.load(index, index % SLOTS)

    def _check_finite(self, sync: Sync) -> None:
        """The trainer ranks look for NaN and Inf in what they pack."""
