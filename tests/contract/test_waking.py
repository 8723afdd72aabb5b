# SPDX-License-Identifier: Apache-2.0
"""The engine resumes while the trainer packs, and a failure of either is everybody's, in real process groups."""

from __future__ import annotations

import asyncio
import time

import torch
import torch.distributed as dist
from test_lora_adapter import Engine
from worlds import run_world

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.manager import ShardingManager

CPU = torch.device("cpu")
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


def manager_of(engine: Sleeper) -> ShardingManager:
    return ShardingManager(None, engine, SyncConfig(timeout_seconds=20.0), 1 << 20, CPU)


def resume(engine: Sleeper, manager: ShardingManager, failing: int = -1) -> tuple[str, SyncReport]:
    """The error and the report of one call."""
    agreement, manager.endpoint, manager.report = manager.agreement, engine, SyncReport()

    def work() -> None:
        engine.order.append("packed")
        time.sleep(SECONDS)
        with agreement.attempt():
            if dist.get_rank() == failing:
                raise MemoryError("injected: cannot pack")
        agreement.settle("packing")

    try:
        asyncio.run(manager.wake(["weights"], work))
        agreement.settle("connecting to the engine")
    except SyncError as error:
        return str(error), manager.report
    return "", manager.report


def resume_and_pack() -> tuple[list[str], dict[str, float]]:
    engine = Sleeper()
    _, report = resume(engine, manager_of(engine))
    return engine.order, report.stages


def test_packs_while_the_engine_resumes() -> None:
    (leader, stages), (other, _) = run_world(2, resume_and_pack, timeout=60)
    assert leader == ["asked for weights", "packed", "resumed"] and other == ["packed"]
    assert stages["update_weights"] >= SECONDS
    assert 0 <= stages["resume_weights"] < SECONDS, "only what the wait for the engine costs beyond the packing"


def fail_and_recover() -> list[tuple[str, int]]:
    manager, found = manager_of(Sleeper()), []
    for fails, failing in ((False, 1), (True, -1), (True, 0), (False, -1)):
        engine = Sleeper(fails)
        text, _ = resume(engine, manager, failing)
        found.append((text, engine.order.count("resumed")))
    return found


def test_failures_are_the_same_everywhere_and_the_engine_has_answered() -> None:
    first, second = run_world(2, fail_and_recover, timeout=60)
    assert [text for text, _ in first] == [text for text, _ in second]
    packing, waking, both, none = (text for text, _ in first)
    assert "failed at 'packing'" in packing and "rank 1: MemoryError: injected: cannot pack" in packing
    assert "failed at 'connecting to the engine'" in waking and "rank 0: RuntimeError: injected: out" in waking
    assert "rank 0: MemoryError" in both and "out of memory" not in both
    assert none == "", "nothing is left over from the failures"
    assert [answered for _, answered in first] == [1, 1, 1, 1], "no resume is left under way"
