# SPDX-License-Identifier: Apache-2.0
"""In which order the rows of a copy are read that lie on several devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_sync_plugin.copies.plain import Block
from verl_sync_plugin.copies.table import ROW_BYTES, KernelTable, alternating

CPU = torch.device("cpu")


@pytest.mark.parametrize("shares", [(0.25,) * 4, (0.79, 0.07, 0.07, 0.07)])
@pytest.mark.parametrize("seed", range(3))
def test_every_home_is_read_evenly_and_in_its_own_order(seed: int, shares: tuple[float, ...]) -> None:
    chance = np.random.default_rng(seed)
    nbytes = chance.integers(1, ROW_BYTES + 1, 2000)
    homes = np.sort(chance.choice(4, 2000, p=shares))  # one after the other, as experts lie
    order = alternating(homes, nbytes)
    assert sorted(order) == list(range(2000))
    everything = np.bincount(homes, nbytes)
    done = np.zeros(4)
    for row in order:
        done[homes[row]] += nbytes[row]
        read = done / everything
        assert read.max() - read.min() < 2 * ROW_BYTES / everything.min()
    for home in range(4):
        assert (np.diff(order[homes[order] == home]) > 0).all()


def test_one_home_stays_as_it_is() -> None:
    assert (alternating(np.zeros(50, int), np.arange(1, 51)) == np.arange(50)).all()


def test_a_table_reads_its_own_device_and_the_others_in_turn() -> None:
    """Two allocations per device; this reader's own device is home 0."""
    blocks = [Block(0, base * 8 * ROW_BYTES, 0, 8 * ROW_BYTES, base=base) for base in range(6)]
    ((_, wide, narrow, count),) = KernelTable(blocks, CPU, homes=[2, 2, 0, 0, 1, 1])._parts
    assert count == 48
    assert narrow[0].tolist()[:12] == [2, 4, 0] * 4 and narrow[0].tolist()[-12:] == [3, 5, 1] * 4
    assert wide[0].tolist()[:6] == [0, 0, 0, ROW_BYTES, ROW_BYTES, ROW_BYTES]
    ((_, _, narrow, _),) = KernelTable(blocks, CPU)._parts
    assert narrow[0].tolist() == [base for base in range(6) for _ in range(8)], "as the blocks come"
