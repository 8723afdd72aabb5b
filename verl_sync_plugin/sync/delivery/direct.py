# SPDX-License-Identifier: Apache-2.0
"""Direct delivery: from the second sync on the engine ranks read the parameters where they lie, and nothing is staged.

The first sync goes through staging memory, for the model's own load needs whole tensors. An engine rank whose plan
then proves to cover everything says so; if every trainer rank can tell where its parameters are, and every engine rank
can map them, the following syncs are one launch of the copy kernel per engine rank. What cannot be read so (merged
adapters, offloaded parameters, a model that loads some tensors itself) is staged as before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.delivery.base import Delivery, Offer, PeersUnreachableError, Questions, Sync
from verl_sync_plugin.sync.delivery.reach import Reach
from verl_sync_plugin.sync.delivery.staged import place_of
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.memory.exports import Live
from verl_sync_plugin.transport.memory.live import LiveParameters, NotInPlaceError
from verl_sync_plugin.transport.protocol import ALL, NONE, Committed, Hello


class Direct(Delivery):
    """See ``Delivery``.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: speaks to the engine rank.
        own, reach: see ``Delivery``.
        device: where the trainer computes.

    Attributes:
        told: the key under which the engine ranks know where this rank's parameters lie; empty at first.
    """

    name = "direct"
    in_place = True

    def __init__(
        self,
        config: SyncConfig,
        agreement: Agreement,
        sender: BucketSender,
        own: Agreement | None,
        reach: Reach,
        device: torch.device,
    ) -> None:
        super().__init__(config, agreement, sender, own, reach)
        self._device = device
        self._wanted = config.delivery in ("auto", "direct")
        self._ready = ""  # the plan of which the engine rank said that it can
        self._answered = ""  # and the one of which it said whether it can
        self._why = ""
        self._parameters: LiveParameters | None = None
        self._live: Live | None = None
        self._lives: tuple[Live, ...] = ()
        self._place = 0
        self.told = ""

    def offer(self, sync: Sync) -> Offer:
        """Looks where the parameters are. If they can be read there, waits until they are final and starts to hash and
        check them: as early as possible, so that it is done before the engine needs the device. If they are staged
        after all, packing does so again."""
        if not self._packs:
            unable = not self._wanted or self._ready != sync.plan.digest
            obstacle = (self._why or "the engine has not yet said that it can") if unable else ""
            return Offer(obstacle, self._answered != sync.plan.digest, not self._wanted, unready=not self._lives)
        self._live = self._look(sync)
        if self._live is None:
            return Offer(
                self._why or "the engine has not yet said that it can",
                self._answered != sync.plan.digest,
                not self._wanted,
            )
        assert self._parameters is not None, "looked"
        self._pack_all(sync)
        self._sender.read(sync.shards, self._parameters.found)
        return Offer(early=self._answered != sync.plan.digest, unready=self._live.key != self.told)

    def _look(self, sync: Sync) -> Live | None:
        if not self._wanted or self._ready != sync.plan.digest:
            return None
        group = sync.source.group
        try:
            reached = sync.plan.sharded and not self._reach.several
            if self._apart and not reached:
                raise NotInPlaceError("trainer and rollout ranks are on several hosts, or cannot share memory")
            if group is not None and dist.get_world_size(group) > 1 and not reached:
                raise NotInPlaceError("ranks that share out the model are on several hosts")
            if sync.source.prepares:
                raise NotInPlaceError("weights are made on the way")
            if self._parameters is None or self._parameters.plan is not sync.plan:
                self._parameters = LiveParameters(self._device, sync.plan, sync.rank)
            return self._parameters.look(sync.shards)
        except NotInPlaceError as error:  # for the rest of the run
            self._wanted, self._why, self._parameters = False, str(error), None
            say(f"parameters are staged, not read where they lie: {error}")
            return None

    def passed_over(self, early: bool, lasting: bool) -> None:
        """Collective: some rank has an obstacle.

        Args:
            early: an engine rank has not said yet whether it can.
            lasting: some rank's obstacle stays; no rank looks again, which costs as much as a small sync.

        Raises:
            SyncError: ``delivery=direct``, and a rank cannot; the same text on every rank.
        """
        self._wanted = self._wanted and not lasting
        if self._config.delivery == "direct" and not early:
            texts = self._agreement.gather("asking why parameters cannot be read", self._why)
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise SyncError(f"{KEY_PREFIX}.delivery=direct: {said or 'not yet possible'}. Set it to auto.")

    def stage(self, sync: Sync) -> None:
        """Collective: the trainer's ranks tell where their parameters lie."""
        everywhere = self._agreement.gather("telling where parameters lie", self._live)
        lives = [everywhere[rank] for rank in sync.senders]
        self._lives, self._place = tuple(live for live in lives if live is not None), place_of(self._me, sync.senders)
        assert len(self._lives) == len(lives), "no rank has an obstacle"
        self.told = self._live.key if self._live is not None else ""

    def fill(self, sync: Sync) -> None:
        """There is nothing to fill."""

    def greet(self, sync: Sync, questions: Questions) -> None:
        """See ``Delivery.greet``; when it returns, every rank's parameters may be read. The use of the tensors is known
        by now."""
        unreachable = ""
        with self._agreement.attempt():
            keys = tuple(live.key for live in self._lives)
            does = (True, questions.hashed, questions.whole)
            own, prove = self._place if self._packs else NONE, questions.prove
            hello = Hello(sync.sync_id, sync.plan.digest, (), self._place, *does, keys, own=own, prove=prove)
            unreachable = self._sender.greet_live(hello, self._lives) if self._loads else ""
        self._settle_reach("reading parameters where they lie", unreachable)

    def run(self, sync: Sync) -> None:
        """Has the engine rank load everything at once."""
        with self._agreement.attempt():
            self._load(sync, ALL, 0)
            self._wait(sync, ALL)
        self._end(sync)

    def note(self, committed: Committed | None, plan: Plan) -> None:
        """The engine rank says whether it could read the next sync in place; where there is none beside this rank, only
        others have something to say against it."""
        obstructed = committed is not None and committed.obstacle
        self._answered, self._ready = plan.digest, "" if obstructed else plan.digest
        if committed is not None and self._wanted and committed.obstacle not in ("", self._why):
            self._why = committed.obstacle
            say(f"parameters are staged, not read where they lie: {self._why}")

    def close(self, sync: Sync) -> None:
        """Gives back the staging memory of earlier syncs. By now all engine ranks have unmapped it, also those that
        failed to commit; told of it again, they would open an export for the second time."""
        self._sender.unstage()

    def fall_back(self, error: PeersUnreachableError) -> None:
        """Until the engine ranks say again that they can, parameters are staged."""
        self._ready, self._answered = "", ""
        if self._config.delivery == "direct":
            raise SyncError(
                f"{KEY_PREFIX}.delivery=direct: an engine rank cannot read parameters where they lie ({error}). "
                "Set it to auto."
            ) from error
        say(f"an engine rank cannot read parameters where they lie ({error}); they are staged instead")
