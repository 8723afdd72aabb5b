# SPDX-License-Identifier: Apache-2.0
"""Which rank of every host has which segments, where ranks lie on several hosts. Pure; imports no torch.

A segment stays with the rank that packs it, and crosses to every other host once: to one rank there, its *holder* on
that host. The holders of a host together have every segment, and the engine ranks of the host read from them. The
segments that come to a host are dealt out to its ranks in turn, so the ranks of hosts with equally many of them talk to
one rank of every other host each, the one with the same number; hosts with unequally many work as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Holders:
    """Of the segments of one group.

    Attributes:
        senders: the rank that packs each segment.
        readers: the ranks beside the engine ranks that read them; these can hold what others have packed.
        hosts: the host of every rank.
    """

    senders: tuple[int, ...]
    readers: tuple[int, ...]
    hosts: tuple[str, ...]

    @cached_property
    def _of_hosts(self) -> dict[str, tuple[int, ...]]:
        """On each host with a reader the rank that holds each segment."""
        found = {}
        for host in dict.fromkeys(self.hosts[rank] for rank in self.readers):
            here = [rank for rank in self.readers if self.hosts[rank] == host]
            turn, holders = 0, []
            for sender in self.senders:
                if self.hosts[sender] == host:
                    holders.append(sender)
                else:
                    holders.append(here[turn % len(here)])
                    turn += 1
            found[host] = tuple(holders)
        return found

    def near(self, rank: int) -> tuple[int, ...]:
        """The holder of each segment on a rank's host, which has a reader."""
        return self._of_hosts[self.hosts[rank]]

    def held(self, rank: int) -> tuple[int, ...]:
        """The segments that lie in a rank's slot, in this order: its own, and those that it holds for its host."""
        near = self._of_hosts.get(self.hosts[rank], ())
        return tuple(
            segment for segment, sender in enumerate(self.senders) if sender == rank or (near and near[segment] == rank)
        )

    def sends(self, rank: int) -> list[tuple[int, int]]:
        """What a rank sends: segment and receiver, one for every other host with a reader."""
        return [
            (segment, near[segment])
            for segment, sender in enumerate(self.senders)
            if sender == rank
            for near in self._of_hosts.values()
            if near[segment] != rank
        ]

    def receives(self, rank: int) -> list[tuple[int, int]]:
        """What a rank receives: segment and sender."""
        return [(segment, self.senders[segment]) for segment in self.held(rank) if self.senders[segment] != rank]


def most_held(groups: Sequence[Holders]) -> int:
    """The most segments that lie in one slot of any of these groups' ranks."""
    return max(len(group.held(rank)) for group in groups for rank in {*group.senders, *group.readers})
