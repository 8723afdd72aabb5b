# SPDX-License-Identifier: Apache-2.0
"""Exchanged delivery: on several hosts every segment crosses to every other host once, and the ranks there share it.

A rank packs its segment into its slot, as in sharded delivery. For every other host one rank of that host receives a
copy into a slot of its own, beside the segments that it packed or received besides (``layout/holders.py``). The ranks
of a host then hold all segments together, and each engine rank reads what it needs from the ranks of its own host, over
the same mapped memory as in sharded delivery. The network carries every byte once per other host, however many ranks a
host has, and no rank stages a whole bucket.
"""

from __future__ import annotations

import torch.distributed as dist

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.layout.holders import Holders
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.sending import Sending
from verl_sync_plugin.sync.delivery.sharded import Sharded
from verl_sync_plugin.sync.sender import SLOTS, Parcel
from verl_sync_plugin.transport.joint import JointRanks
from verl_sync_plugin.transport.link import GroupLink, Link


class Exchanged(Sending, Sharded):
    """See ``Delivery``."""

    name = "exchanged"
    shared = True
    _link: GroupLink | None = None
    _parcels: tuple[str, Holders, list[tuple[list[Parcel], list[Parcel]]]] | None = None

    def _obstacle(self, sync: Sync) -> str:
        return "" if sync.plan.sharded and self._reach.several else self._reach.why_exchanged

    @property
    def _holds(self) -> bool:
        return True

    def _holders(self, sync: Sync) -> Holders:
        return Holders(sync.senders, sync.readers, self._reach.hosts)

    def _sources(self, sync: Sync) -> tuple[int, ...]:
        """The holders on this host, of which one is this rank where trainer and rollout share their GPUs."""
        return tuple(sorted(set(self._holders(sync).near(self._me)))) if self._loads else ()

    def _readers(self, sync: Sync) -> tuple[int, ...]:
        """The ranks of this host that read; none of what is empty, for an export that is never opened stays."""
        hosts, holds = self._reach.hosts, self._holders(sync).held(self._me)
        return tuple(rank for rank in sync.readers if holds and hosts[rank] == hosts[self._me])

    def _homes(self, sync: Sync) -> tuple[tuple[int, int], ...]:
        holders, sources = self._holders(sync), self._sources(sync)
        held = {rank: holders.held(rank) for rank in sources}
        near = holders.near(self._me)
        return tuple((sources.index(rank), held[rank].index(segment)) for segment, rank in enumerate(near))

    def _place_in(self, sync: Sync, sources: tuple[int, ...]) -> int:
        """Apart, what all trainer ranks hold is the first segment's sender's to send."""
        if not self._apart:
            return sources.index(self._me)
        return sources.index(self._holders(sync).near(self._me)[0]) if self._loads else 0

    def _number(self, sync: Sync) -> int:
        holders, senders = self._holders(sync), sync.senders
        return holders.held(self._me).index(senders.index(self._me)) if self._me in senders else 0

    def _send(self, sync: Sync, index: int) -> None:
        """Starts to bring a bucket's segments to their holders on other hosts."""
        bucket = sync.plan.buckets[index]
        if bucket.world == 1 and not self._apart:
            return  # every rank has packed all of it
        sends, receives = self._parcels_of(sync)[index]
        try:
            self._sender.exchange(bucket, index % SLOTS, sends, receives, self._link_of(sync))
        except RuntimeError as error:
            instead = "broadcast" if self._apart else "gathered"
            raise RuntimeError(
                f"{error}. Where ranks of different hosts cannot reach each other, set {KEY_PREFIX}.delivery={instead}."
            ) from error
        sync.report.network_bytes += sum(parcel.nbytes for parcel in receives)

    def _parcels_of(self, sync: Sync) -> list[tuple[list[Parcel], list[Parcel]]]:
        """What this rank sends and receives of every bucket; made once per plan."""
        holders, plan = self._holders(sync), sync.plan
        if self._parcels is None or self._parcels[:2] != (plan.digest, holders):
            number = {segment: number for number, segment in enumerate(holders.held(self._me))}
            ways = holders.sends(self._me), holders.receives(self._me)
            of_buckets = []
            for bucket in plan.buckets:
                sends, receives = (
                    [
                        Parcel(number[segment], nbytes, peer)
                        for segment, peer in way
                        if segment < bucket.world and (nbytes := bucket.filled(plan.bases, segment))
                    ]
                    for way in ways
                )
                of_buckets.append((sends, receives))
            self._parcels = plan.digest, holders, of_buckets
        return self._parcels[2]

    def _link_of(self, sync: Sync) -> Link:
        ranks = self._agreement.ranks
        if isinstance(ranks, JointRanks):
            return ranks
        group = sync.source.group
        assert isinstance(group, dist.ProcessGroup), "bases are shared out over it"
        if self._link is None or self._link.group is not group:
            self._link = GroupLink(group, self._config.timeout_seconds)
        return self._link
