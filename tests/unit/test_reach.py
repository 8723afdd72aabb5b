# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout on hosts of their own: where segments are exchanged, and where they are broadcast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.sync.delivery import reach


def decided(hosts: str, trainers: int, delivery: str = "auto") -> reach.Reach:
    """Of ranks on hosts of one letter each, the trainer's first."""
    everybody = range(len(hosts))
    ranks = SimpleNamespace(trainers=tuple(everybody[:trainers]), rollouts=tuple(everybody[trainers:]))
    agreement: Any = SimpleNamespace(ranks=ranks, gather=lambda what, mine: list(hosts))
    made = reach.Reach(SyncConfig(delivery=delivery), agreement)
    made.decide_apart()
    return made


@pytest.mark.parametrize(
    ("hosts", "trainers", "exchanged"),
    [
        ("aabb", 2, True),
        ("abcd", 2, True),  # as many hosts have engines as send
        ("aabc", 2, False),  # one sends to two
        ("aaabc", 2, False),  # the engine beside the trainer needs no network
        ("aaab", 2, True),
        ("abcde", 2, False),
    ],
)
def test_more_hosts_of_engines_than_senders_get_a_broadcast(hosts: str, trainers: int, exchanged: bool) -> None:
    found = decided(hosts, trainers)
    assert (found.possible, found.several) == (exchanged, True)
    assert decided(hosts, trainers, "exchanged").possible, "asked for by name"
    if not exchanged:
        assert "so the bytes are broadcast" in found.why_exchanged


def test_one_host_neither_exchanges_nor_broadcasts() -> None:
    found = decided("aaaa", 2)
    assert found.possible and not found.several
