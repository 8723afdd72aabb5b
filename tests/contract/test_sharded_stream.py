# SPDX-License-Identifier: Apache-2.0
"""A sharded stream between real process groups: no segment is read before it is packed, none overwritten while read.

The sender notes when what happens; what it packs and what the engine loads take their time on one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from worlds import run_world

from contract.sources import WorldSource, everyone
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.sync.ways import Reach, Staged, Sync
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Loaded

SLOW = 0.03
Note = tuple[float, int, str, int]  # when, rank, what, bucket


class Noting:
    """A sender whose engine rank loads a bucket some time after it was told to."""

    def __init__(self, slow_engine: int, slow_trainer: int) -> None:
        self.rank = dist.get_rank()
        self.notes: list[Note] = []
        self._engine = SLOW if self.rank == slow_engine else 0.0
        self._trainer = SLOW if self.rank == slow_trainer else 0.0

    def _note(self, what: str, bucket: int) -> None:
        self.notes.append((time.monotonic(), self.rank, what, bucket))  # one clock for all processes of a host

    def begin(self, plan: Plan, rank: int, hashed: bool, finite: bool) -> None:
        pass

    def pack(self, index: int, slot: int, shards: list[Shard]) -> None:
        assert index % SLOTS == slot
        self._note("pack", index)
        self._packing = index

    def broken(self) -> list[int]:
        return []

    def drain(self, slot: int) -> None:
        time.sleep(self._trainer)
        self._note("packed", self._packing if self._packing % SLOTS == slot else slot)

    def load(self, index: int, slot: int) -> None:
        self._note("load", index)

    def wait_loaded(self, index: int) -> Loaded:
        time.sleep(self._engine)
        self._note("loaded", index)
        return Loaded(index, 0.0, 0.0)


def stream(buckets: int, slow_engine: int, slow_trainer: int) -> list[Note]:
    """What this rank noted."""
    bases = tuple(Base(f"w{i}", "uint8", 1, (64, 64), (View(f"w{i}", (128,), 0, 128),)) for i in range(buckets))
    plan = plan_buckets(bases, 64, sharded=True)
    assert len(plan.buckets) == buckets
    sender = Noting(slow_engine, slow_trainer)
    agreement = Agreement(20.0)
    running = Staged(SyncConfig(), agreement, sender, agreement, Reach(agreement))  # type: ignore[arg-type]
    sync = Sync("1", plan, WorldSource(), [], SyncReport(), everyone(), everyone())
    running.fill(sync)
    running.run(sync)
    agreement.settle("committing")
    assert sync.report.handed_over == ((plan, buckets - 1) if buckets else None)  # what the progress line tells
    assert len([span for span in sync.report.spans if span[0] == "engine_load"]) == buckets
    return sender.notes


def when(notes: list[Note], choose: Callable[[float, float], float], what: str, bucket: int) -> float:
    times = [at for at, _, said, index in notes if (said, index) == (what, bucket)]
    found = times[0]
    for at in times[1:]:
        found = choose(found, at)
    return found


@pytest.mark.parametrize(("slow_engine", "slow_trainer"), [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("buckets", [0, 1, 2, 3, 4, 9])
def test_order(buckets: int, slow_engine: int, slow_trainer: int) -> None:
    results = run_world(2, stream, buckets, slow_engine, slow_trainer, timeout=60)
    notes = [note for of_rank in results for note in of_rank]
    for what in ("pack", "load", "loaded"):
        assert sorted(n[3] for n in notes if n[2] == what) == sorted(2 * list(range(buckets))), what
    for index in range(buckets):
        first_read, last_packed = when(notes, min, "load", index), when(notes, max, "pack", index)
        assert last_packed < first_read, f"bucket {index} was read before all ranks had packed it"
        if index + SLOTS < buckets:
            last_read, refilled = when(notes, max, "loaded", index), when(notes, min, "pack", index + SLOTS)
            assert last_read < refilled, f"the slot of bucket {index} was filled again while it was read"
