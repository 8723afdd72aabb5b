# SPDX-License-Identifier: Apache-2.0
"""Who holds which segments on which host, for hosts with equally and unequally many ranks, together and apart."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from verl_sync_plugin.layout.holders import Holders, most_held

TOGETHER = [Holders(tuple(range(len(hosts))), tuple(range(len(hosts))), hosts) for hosts in product("abc", repeat=4)]
APART = [Holders((0, 1, 2), (3, 4, 5), hosts) for hosts in product("abc", repeat=6)]


@pytest.mark.parametrize("cases", [TOGETHER, APART], ids=["together", "apart"])
def test_every_segment_crosses_once_to_every_other_host_with_a_reader(cases: list[Holders]) -> None:
    for case in cases:
        crossed = Counter((s, case.hosts[peer]) for rank in case.senders for s, peer in case.sends(rank))
        reading = {case.hosts[rank] for rank in case.readers}
        needed = {(s, host) for s, rank in enumerate(case.senders) for host in reading - {case.hosts[rank]}}
        assert crossed == dict.fromkeys(needed, 1), case


@pytest.mark.parametrize("cases", [TOGETHER, APART], ids=["together", "apart"])
def test_what_one_rank_sends_another_receives_and_holds(cases: list[Holders]) -> None:
    for case in cases:
        everyone = range(len(case.hosts))
        sent = {(s, rank, peer) for rank in everyone for s, peer in case.sends(rank)}
        assert sent == {(s, sender, rank) for rank in everyone for s, sender in case.receives(rank)}, case
        for rank in case.readers:
            for segment, holder in enumerate(case.near(rank)):
                assert case.hosts[holder] == case.hosts[rank] and segment in case.held(holder), case
        for segment, sender in enumerate(case.senders):
            assert segment in case.held(sender), case


@pytest.mark.parametrize("cases", [TOGETHER, APART], ids=["together", "apart"])
def test_the_ranks_of_a_host_share_what_comes_to_it_evenly(cases: list[Holders]) -> None:
    for case in cases:
        for host in {case.hosts[rank] for rank in case.readers}:
            counts = [len(case.receives(rank)) for rank in case.readers if case.hosts[rank] == host]
            assert max(counts) - min(counts) <= 1, case
        assert most_held([case]) == max(len(case.held(rank)) for rank in range(len(case.hosts)))


@pytest.mark.parametrize("cases", [TOGETHER, APART], ids=["together", "apart"])
def test_between_two_ranks_goes_one_segment_in_each_direction(cases: list[Holders]) -> None:
    """More than that ``transport/link.py`` does not carry at a time."""
    for case in cases:
        ways = Counter((rank, peer) for rank in case.senders for _, peer in case.sends(rank))
        assert all(count == 1 for count in ways.values()), case


def test_ranks_of_equal_hosts_talk_to_the_one_with_their_number() -> None:
    case = Holders((0, 1, 2, 3), (0, 1, 2, 3), ("a", "a", "b", "b"))
    assert [case.sends(rank) for rank in range(4)] == [[(0, 2)], [(1, 3)], [(2, 0)], [(3, 1)]]
    assert [case.held(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
