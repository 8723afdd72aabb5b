# SPDX-License-Identifier: Apache-2.0
"""Which syncs are verified, and how parts of tensors that engine ranks hold are weighed to be compared together."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.transport.proof import Parts
from verl_sync_plugin.verify.balance import balance
from verl_sync_plugin.verify.cadence import Cadence
from verl_sync_plugin.verify.destination import weighed

WHOLE = ((Run(0, 0, 96),),)
UPPER, LOWER = ((Run(0, 0, 48),),), ((Run(48, 0, 48),),)
COLUMNS = [((Run(0, 0, 4, 12, 8),),), ((Run(4, 0, 4, 12, 8),),)]
# Queries are shared out, keys and values held by both ranks
FUSED = [((Run(half, 0, 32),), (Run(64, 0, 16),), (Run(80, 0, 16),)) for half in (0, 32)]


@pytest.mark.parametrize(
    ("everyone", "times", "factors"),
    [
        ([WHOLE], 1, [(1,)]),
        ([WHOLE, WHOLE], 2, [(1,), (1,)]),
        ([UPPER, LOWER], 1, [(1,), (1,)]),
        (COLUMNS, 1, [(1,), (1,)]),
        ([*COLUMNS, WHOLE], 2, [(1,), (1,), (1,)]),
        (FUSED, 2, [(2, 1, 1), (2, 1, 1)]),
        ([*FUSED, WHOLE], -1, [(0, 0, 0), (0, 0, 0), (0,)]),  # the whole part overlaps what is held unequally often
        ([UPPER, UPPER, LOWER], 2, [(1,), (1,), (2,)]),
        ([UPPER, ()], -1, [(0,), ()]),  # nobody holds the rest
        ([UPPER, UPPER], -1, [(0,), (0,)]),
    ],
)
def test_parts_are_weighed_so_that_every_byte_counts_alike(
    everyone: list[Parts], times: int, factors: list[tuple[int, ...]]
) -> None:
    assert balance(96, tuple(everyone)) == (times, tuple(factors))


def test_weights_are_what_counting_gives() -> None:
    generator, found = random.Random(3), set()
    for _ in range(300):
        cuts = sorted({0, 24, *(generator.randrange(1, 24) for _ in range(generator.randint(0, 3)))})
        pieces = list(itertools.pairwise(cuts))
        everyone = tuple(
            tuple((Run(low, 0, high - low),) for low, high in pieces if generator.random() < 0.8)
            for _ in range(generator.randint(1, 3))
        )
        times, factors = balance(24, everyone)
        counts = np.zeros(24, dtype=int)
        for parts, weights in zip(everyone, factors, strict=True):
            for (run,), weight in zip(parts, weights, strict=True):
                counts[run.source : run.source + run.width] += weight
        found.add(times)
        assert (times == -1 and not counts.any()) or (counts == times).all(), everyone
    assert {-1, 1, 2, 6} <= found


def test_sums_of_parts_become_one_of_each_tensor() -> None:
    placed = ((96, FUSED[0], (2, 0)), (96, WHOLE, (1,)))
    sums = np.array([1, 2, 3, 10, 20, 30, 7], dtype="<i8").tobytes()
    assert weighed(sums, placed, {2: (2, 1, 1), 0: (1, 1, 1), 1: (5,)}, 3).tolist() == [60, 35, 7]
    with pytest.raises(ValueError, match="hashed 8 parts of parameters, and told of 7"):
        weighed(sums + b"\0" * 8, placed, {2: (2, 1, 1), 0: (1, 1, 1), 1: (5,)}, 3)


@pytest.mark.parametrize(
    ("verify", "due"),
    [("never", ""), ("always", "123456"), ("first", "123"), (1, "123456"), (2, "135"), (3, "14")],
)
def test_which_syncs_are_verified(verify: str | int, due: str) -> None:
    cadence, found = Cadence(verify), ""
    for number in range(1, 7):
        found += str(number) * cadence.due("plan")
        assert cadence.due("plan") == cadence.due("plan"), "a sync that fails is not counted"
        cadence.note("plan")
    assert found == due
    assert cadence.due("another") == (verify != "never"), "every plan has its own"
