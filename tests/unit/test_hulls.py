# SPDX-License-Identifier: Apache-2.0
"""Whose hash every byte of a bucket goes into."""

from __future__ import annotations

from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Entry, Hull, Plan, View, hulls_of, numbers_of


def entry(name: str, *pieces: tuple[int, int]) -> Entry:
    parts = tuple(Run(offset, 0, nbytes) for offset, nbytes in pieces)
    return Entry(name, "uint8", (64,), None, 64, parts)


def test_hulls() -> None:
    entries = (
        entry("a", (0, 16), (64, 16)),
        entry("b", (16, 8)),
        entry("tied", (0, 16), (64, 16)),
        entry("c", (20, 9)),
    )
    assert hulls_of(entries) == [
        Hull(0, 16, ("a", "tied")),
        Hull(16, 29, ("b", "c"), equal=False),
        Hull(64, 80, ("a", "tied")),
    ]


def planned(sharded: bool) -> Plan:
    views = (View("w", (64,), 0, 64),)
    return plan_buckets((Base("w", "uint8", 1, (32, 32), views),), 64, sharded)


def test_a_sharded_bucket_is_bounded_by_what_a_rank_stages() -> None:
    gathered, sharded = planned(False), planned(True)
    assert (gathered.slot_bytes, gathered.buckets[0].nbytes) == (64, 64)
    assert (sharded.slot_bytes, sharded.buckets[0].nbytes) == (32, 64)
    assert gathered.digest != sharded.digest
    assert numbers_of(bucket.entries for bucket in sharded.buckets) == {"w": 0}
