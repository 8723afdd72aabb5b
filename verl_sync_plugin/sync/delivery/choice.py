# SPDX-License-Identifier: Apache-2.0
"""Which way of delivery a sync takes: the first of direct, sharded, exchanged and gathered to which no rank has an
obstacle.

Where trainer and rollout are apart, broadcast is in the place of gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.log import say
from verl_sync_plugin.sync.delivery.base import Delivery, Offer, PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.broadcast import Broadcast
from verl_sync_plugin.sync.delivery.direct import Direct
from verl_sync_plugin.sync.delivery.exchanged import Exchanged
from verl_sync_plugin.sync.delivery.gathered import Gathered
from verl_sync_plugin.sync.delivery.reach import Reach
from verl_sync_plugin.sync.delivery.sharded import Sharded
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed


class Choice:
    """Chooses anew in every sync: an engine rank learns what it can, and a trainer may move its parameters.

    Args:
        config: the sync's settings.
        agreement: where ranks settle.
        sender: packs, and speaks to the engine rank.
        device: where the trainer computes.
        own: where the trainer's ranks settle among themselves, if the rollout's ranks are others; then what cannot be
            read over memory is broadcast, not gathered.

    Attributes:
        reach: decides how plans are laid out.
    """

    def __init__(
        self,
        config: SyncConfig,
        agreement: Agreement,
        sender: BucketSender,
        device: torch.device,
        own: Agreement | None = None,
    ) -> None:
        self._agreement = agreement
        self.reach = Reach(config, agreement)
        parts = (config, agreement, sender, own, self.reach)
        self.direct = Direct(*parts, device)
        self.sharded = Sharded(*parts)
        last = Broadcast(*parts) if own is not None else Gathered(*parts)
        self._ways: tuple[Delivery, ...] = (self.direct, self.sharded, Exchanged(*parts), last)
        self._chosen: Delivery | None = None

    def of(self, sync: Sync) -> Delivery:
        """Collective: the way of this sync, ready to ``fill``.

        Raises:
            SyncError: any rank failed, or ``custom.sync.delivery`` asks for a way that a rank has an obstacle to.
        """
        offers = [Offer("this rank failed", early=True)] * len(self._ways)
        with self._agreement.attempt():
            if not self._agreement.failed:
                offers = [way.offer(sync) for way in self._ways]
        flags = torch.tensor([offer.flags for offer in offers], dtype=torch.int64)
        everywhere = self._agreement.sum("choosing the delivery", flags).tolist()
        for way, (unable, early, lasting, unready) in zip(self._ways, everywhere, strict=True):
            if not unable:
                if unready:
                    way.stage(sync)
                if way is not self._chosen and self._agreement.ranks.rank == 0:
                    _say_why(way, self._ways, offers)
                self._chosen = way
                return way
            if way is self.direct:
                self.direct.passed_over(early=bool(early), lasting=bool(lasting))
        self._agreement.settle("choosing the delivery")
        raise AssertionError(
            "only a rank that has failed has an obstacle to every way, and then the ranks have settled"
        )

    def note(self, committed: Committed | None, plan: Plan) -> None:
        """Takes in what the engine rank said at the end of a sync, if there is one beside this rank."""
        self.direct.note(committed, plan)

    def fall_back(self, error: PeersUnreachableError) -> None:
        """The way chosen last was out of reach: the next sync takes another one.

        Raises:
            SyncError: ``custom.sync.delivery`` asks for that way by name.
        """
        assert self._chosen is not None, "chosen, and out of reach"
        self._chosen.fall_back(error)


def _say_why(chosen: Delivery, ways: Sequence[Delivery], offers: Sequence[Offer]) -> None:
    """One line for the log whenever the delivery changes, with the obstacles to those that come before it."""
    passed = zip(ways[: ways.index(chosen)], offers, strict=False)
    why = "; ".join(f"not {way.name}: {offer.obstacle or 'another rank has an obstacle'}" for way, offer in passed)
    say(f"delivery is {chosen.name}" + (f" ({why})" if why else ""))
