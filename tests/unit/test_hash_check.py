# SPDX-License-Identifier: Apache-2.0
"""How often engine ranks read each byte, and the comparison of hashes that needs it."""

from __future__ import annotations

import random

import pytest
import torch

from verl_sync_plugin.copies.hulls import Hull, hulls_of, numbers_of
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Entry, Plan, View
from verl_sync_plugin.transport.protocol import Readings
from verl_sync_plugin.verify.hashes import times_read

WHOLE = (Run(0, 0, 96),)
COLUMNS = [(Run(0, 0, 4, 12, 8),), (Run(4, 0, 4, 12, 8),)]  # two ranks, a matrix of 12 rows cut along dimension 1
ROWS = [(Run(0, 0, 48),), (Run(48, 0, 48),)]


def readings(*by_rank: tuple[Run, ...]) -> list[Readings]:
    return [((96, runs, (0,)),) for runs in by_rank]


@pytest.mark.parametrize(
    ("by_rank", "times"),
    [
        ((WHOLE,), 1),
        ((WHOLE, WHOLE, WHOLE), 3),
        (ROWS, 1),
        (COLUMNS, 1),
        ([*ROWS, *COLUMNS], 2),  # two engines that cut differently
        ([*ROWS, *ROWS], 2),  # heads that two ranks share
        ([(*ROWS[0], *ROWS[1])], 1),
        ([(), ()], 0),  # the model skips it
        ([ROWS[0], ROWS[0]], -1),  # as many bytes as one whole
        ([WHOLE, ROWS[0]], -1),
        ([ROWS[0]], -1),
        ([(Run(8, 0, 48),), (Run(48, 0, 48),)], -1),
        ([COLUMNS[0], COLUMNS[0], ROWS[1]], -1),
    ],
)
def test_times_read(by_rank: list[tuple[Run, ...]], times: int) -> None:
    assert times_read(1, readings(*by_rank)).tolist() == [times]


def test_times_read_is_what_counting_gives() -> None:
    generator = random.Random(1)
    found = set()
    for _ in range(300):
        by_rank, counts = [], torch.zeros(24, dtype=torch.int64)
        for _ in range(generator.randint(1, 3)):
            runs = []
            for _ in range(generator.randint(0, 2)):
                width, stride = generator.choice([(24, 24), (12, 12), (6, 12), (12, 24), (3, 6)])
                count = generator.randint(1, 24 // stride)
                start = generator.choice([0, width])
                if start + (count - 1) * stride + width > 24:
                    continue
                runs.append(Run(start, 0, width, count, stride))
                for i in range(count):
                    counts[start + i * stride :][:width] += 1
            by_rank.append(tuple(runs))
        expected = int(counts[0]) if bool((counts == counts[0]).all()) else -1
        found.add(expected)
        assert times_read(1, [((24, runs, (0,)),) for runs in by_rank]).tolist() == [expected], by_rank
    assert {-1, 0, 1, 2} <= found


def test_tensors_that_only_some_ranks_know() -> None:
    assert times_read(3, [((96, WHOLE, (0, 2)),), ((96, WHOLE, (2,)),)]).tolist() == [1, 0, 2]


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
