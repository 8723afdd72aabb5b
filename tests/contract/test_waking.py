# SPDX-License-Identifier: Apache-2.0
"""The engine resumes while the trainer packs, and a failure of either is everybody's, in real process groups."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from verl_sync_plugin.config.bucket_size import AutoBucket
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.wake import Waking
from verl_sync_plugin.transport.agreement import Agreement

CPU = torch.device("cpu")
GIB = 1 << 30
SECONDS = 0.3


class Sleeper(Engine):
    """Takes its time to resume, in a thread, as a server actor would."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.order: list[str] = []

    async def resume(self, tags: list[str]) -> None:
        self.order.append(f"asked for {','.join(tags)}")
        await asyncio.to_thread(time.sleep, SECONDS)
        self.order.append("resumed")
        if self.fails:
            raise RuntimeError("injected: out of memory")


def resume(engine: Sleeper, agreement: Agreement, failing: int = -1) -> tuple[str, SyncReport]:
    """The error and the report of one call."""
    report = SyncReport()

    def work() -> None:
        engine.order.append("packed")
        time.sleep(SECONDS)
        with agreement.attempt():
            if dist.get_rank() == failing:
                raise MemoryError("injected: cannot pack")
        agreement.settle("packing")

    try:
        asyncio.run(Waking(agreement, engine, CPU).resume(["weights"], report, work))
    except SyncError as error:
        return str(error), report
    return "", report


def resume_and_pack() -> tuple[list[str], dict[str, float]]:
    engine = Sleeper()
    _, report = resume(engine, Agreement(20.0))
    return engine.order, report.stages


def test_packs_while_the_engine_resumes() -> None:
    (leader, stages), (other, _) = run_world(2, resume_and_pack, timeout=60)
    assert leader == ["asked for weights", "packed", "resumed"] and other == ["packed"]
    assert stages["update_weights"] >= SECONDS
    assert 0 <= stages["resume_weights"] < SECONDS, "only what the wait for the engine costs beyond the packing"


def fail_and_recover() -> list[tuple[str, int]]:
    agreement, found = Agreement(20.0), []
    for fails, failing in ((False, 1), (True, -1), (True, 0), (False, -1)):
        engine = Sleeper(fails)
        text, _ = resume(engine, agreement, failing)
        found.append((text, engine.order.count("resumed")))
    return found


def test_failures_are_the_same_everywhere_and_the_engine_has_answered() -> None:
    first, second = run_world(2, fail_and_recover, timeout=60)
    assert [text for text, _ in first] == [text for text, _ in second]
    packing, waking, both, none = (text for text, _ in first)
    assert "failed at 'packing'" in packing and "rank 1: MemoryError: injected: cannot pack" in packing
    assert 'failed at "resuming the engine\'s weights"' in waking and "rank 0: RuntimeError: injected: out" in waking
    assert "rank 0: MemoryError" in both and "out of memory" not in both
    assert none == "", "nothing is left over from the failures"
    assert [answered for _, answered in first] == [1, 1, 1, 1], "no resume is left under way"


class Device:
    """What one rank measures; breaks on demand once the weights are back."""

    def __init__(self, free: int, broken: bool) -> None:
        self.free, self.broken, self.readings = free, broken, 0

    def read(self) -> tuple[int, int]:
        self.readings += 1
        if self.broken and self.readings == 2:
            raise RuntimeError("injected: no such device")
        return self.free, 80 * GIB


def choose(frees: list[int], broken: tuple[int, ...]) -> tuple[int, str]:
    rank = dist.get_rank()
    waking = Waking(Agreement(20.0), Engine(), CPU)
    auto = AutoBucket(0.0, Device(frees[rank] * GIB, rank in broken).read)
    try:
        return asyncio.run(waking.choose_bucket(auto, ["weights"], SyncReport())), ""
    except SyncError as error:
        return 0, str(error)


@pytest.mark.parametrize(("frees", "megabytes"), [([60, 9, 30], 512), ([2, 60, 60], 128), ([60, 60, 60], 2048)])
def test_all_ranks_take_the_size_of_the_one_with_the_least(frees: list[int], megabytes: int) -> None:
    assert run_world(3, choose, frees, (), timeout=60) == [(megabytes << 20, "")] * 3


def test_a_rank_that_cannot_measure_is_everybodys_failure() -> None:
    results = run_world(3, choose, [60, 60, 60], (2,), timeout=60)
    assert len({text for _, text in results}) == 1
    assert "rank 2: RuntimeError: injected: no such device" in results[0][1]


def finish_after_a_failure() -> tuple[str, list[str]]:
    """The leader has failed to measure its device; the engine is resumed all the same, and every rank hears of it."""
    agreement, finished = Agreement(20.0), list[str]()

    class Finishing(Engine):
        async def finish(self, tags: list[str]) -> None:
            finished.extend(tags)

    with agreement.attempt():
        if dist.get_rank() == 0:
            raise RuntimeError("injected: no such device")
    try:
        asyncio.run(Waking(agreement, Finishing(), CPU).finish(["kv_cache"], SyncReport()))
    except SyncError as error:
        return str(error), finished
    return "", finished


def test_an_engine_is_woken_whole_also_by_a_rank_that_has_failed() -> None:
    (leader, finished), (other, _) = run_world(2, finish_after_a_failure, timeout=60)
    assert leader == other and "rank 0: RuntimeError: injected: no such device" in leader
    assert finished == ["kv_cache"], "the engine's gate would stay shut"
