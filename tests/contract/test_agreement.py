# SPDX-License-Identifier: Apache-2.0
"""All ranks come to the same end, in real process groups: also where the engine resumes while the trainer packs, or is
silent, and then is asked and waited for once."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract.sources import everyone, same_everywhere
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.load_map import Box, Kept, LoadMap, Move, Place
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.verify import Comparison

CPU = torch.device("cpu")
SECONDS = 0.3
WAIT = 2.5


def settled(agreement: Agreement, what: str) -> str:
    try:
        agreement.settle(what)
    except SyncError as error:
        return str(error)
    return ""


@on_ranks(2, timeout=40)
def test_every_rank_takes_a_step_or_none() -> None:
    """A rank that failed before one does not begin it; then it is no rank's."""
    agreement, rank = Agreement(20.0), dist.get_rank()
    heard: list[object] = []
    begun: list[str] = []

    def work(what: str, fails: bool = False) -> int:
        begun.append(what)
        if fails:
            raise ValueError(f"injected: {what}")
        return rank

    heard.append(agreement.step("first", lambda: work("first")))
    heard.append(agreement.any("second", lambda: rank == 1))
    heard.append(agreement.any("third", lambda: False))
    with agreement.attempt():
        work("before", fails=rank == 1)
    for what in ("after", "again"):
        try:
            heard.append(agreement.step(what, lambda what=what: work(what)))
        except SyncError as error:
            heard.append(str(error).splitlines()[-1])
    assert heard == [rank, True, False, "rank 1: ValueError: injected: before", rank]
    assert begun == ["first", "before", *["after"] * (rank == 0), "again"]


@on_ranks(2, timeout=60)
def test_a_cancelled_rank_is_cancelled_and_the_others_hear_of_it() -> None:
    agreement, first = Agreement(20.0), dist.get_rank() == 0

    async def waking() -> None:
        with agreement.attempt():
            await asyncio.sleep(600.0 if first else 0.0)
        agreement.settle("waking")

    async def ended() -> BaseException | None:
        task = asyncio.ensure_future(waking())
        await asyncio.sleep(0.5)
        if first:
            task.cancel()
        try:
            await task
        except (Exception, asyncio.CancelledError) as error:
            return error
        return None

    error = asyncio.run(ended())
    assert type(error) is (asyncio.CancelledError if first else SyncError)
    assert first or "rank 0: RuntimeError: this rank was cancelled" in str(error)
    assert settled(agreement, "later") == "", "something is left of it for the next stage"


@on_ranks(2, timeout=60)
def test_an_engine_without_room_for_marks_fails_the_proof_of_all() -> None:
    """Of two engines, one had no memory for marks."""
    plan = plan_buckets((Base("a", "bfloat16", 2, (64,), (View("a", (64,), 0, 64),)),), 1 << 10)
    whole, lacks = Box(0, 0, ((64, 1, 1),)), "full" if dist.get_rank() else ""
    places, moves = (Place("x", (Kept("x", "bfloat16", whole, False),)),), (Move(0, 0, "bfloat16", whole),)
    comparison = Comparison(SyncConfig(verify="always"), Agreement(20.0), (dist.get_rank(),), True)
    comparison.note(LoadMap("Model", places=places, moves=moves, no_room=lacks))
    comparison.learn(plan, loaded=False)
    with pytest.raises(SyncError) as caught:
        comparison.refuse_unproven()
    assert "not every engine rank could find out what it holds (full)" in same_everywhere(str(caught.value))


# The engine


class Engine(RolloutEndpoint):
    """Rank 0 leads. ``asked`` has all that the engine was asked for, and what came of it."""

    def __init__(self) -> None:
        super().__init__(rollout_of("sglang"), None, everyone(), timeout_seconds=WAIT)
        self.leader = dist.get_rank() == 0
        self.asked: list[str] = []


class Sleeper(Engine):
    """Takes its time to resume, in a thread, as a server actor would."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    async def resume(self, tags: list[str]) -> None:
        self.asked.append(f"asked for {','.join(tags)}")
        await asyncio.to_thread(time.sleep, SECONDS)
        self.asked.append("resumed")
        if self.fails:
            raise RuntimeError("injected: out of memory")


@on_ranks(2, timeout=60)
def test_packs_while_the_engine_resumes_and_a_failure_of_either_is_everybodys() -> None:
    manager = ShardingManager(None, Engine(), SyncConfig(timeout_seconds=20.0), 1 << 20, CPU)
    agreement, texts, engines = manager.agreement, list[str](), list[Sleeper]()
    for fails, failing in ((False, -1), (False, 1), (True, -1), (True, 0), (False, -1)):
        manager.endpoint = engine = Sleeper(fails)
        manager.report = SyncReport()

        def pack(asked: list[str] = engine.asked, failing: int = failing) -> None:
            asked.append("packed")
            time.sleep(SECONDS)
            with agreement.attempt():
                if dist.get_rank() == failing:
                    raise MemoryError("injected: cannot pack")
            agreement.settle("packing")

        try:
            asyncio.run(manager.wake(["weights"], pack))
            text = settled(agreement, "connecting to the engine")
        except SyncError as error:
            text = str(error)
        texts.append(same_everywhere(text))
        engines.append(engine)
        if len(engines) == 1 and engine.leader:
            stages = manager.report.stages
            assert stages["update_weights"] >= SECONDS
            assert 0 <= stages["resume_weights"] < SECONDS, "only what the wait for the engine costs beyond the packing"
    assert engines[0].asked == (["asked for weights", "packed", "resumed"] if engines[0].leader else ["packed"])
    good, packing, waking, both, again = texts
    assert "failed at 'packing'" in packing and "rank 1: MemoryError: injected: cannot pack" in packing
    assert "failed at 'connecting to the engine'" in waking and "rank 0: RuntimeError: injected: out" in waking
    assert "rank 0: MemoryError" in both and "out of memory" not in both
    assert good == again == "", "nothing is left over from the failures"
    assert all(each.asked.count("resumed") == each.leader for each in engines), "a resume is left under way"


class Silent(Engine):
    """Answers nothing of what it is asked."""

    def _start(self, method: str, *arguments: Any) -> Future[Any]:
        self.asked.append(f"{method}: {arguments[0]}" if method == "abandon_sync" else method)
        return Future()


class Manager(ShardingManager):
    """Of a trainer that cannot be read; its engine may be to get an adapter, after its base."""

    def __init__(self, engine: Engine, serves_adapter: bool) -> None:
        super().__init__(None, engine, SyncConfig(timeout_seconds=WAIT), 1 << 20, CPU)
        self.trainer: Any = SimpleNamespace(serves_adapter=serves_adapter, device=CPU, name="", model="")

    def open_source(self) -> ParameterSource:
        raise ValueError(f"no source; garbage is collected: {gc.isenabled()}")


@pytest.mark.parametrize(
    ("where", "asked"),
    [("plan", ["load_weights"]), ("base", ["load_weights"]), ("adapter", []), ("finish", ["finish_sync"])],
)
@on_ranks(2, timeout=60)
def test_a_silent_engine_hears_of_a_failure_once_and_is_waited_for_once(where: str, asked: list[str]) -> None:
    """While it also does not end the load that it was asked for."""
    engine = Silent()
    manager = Manager(engine, serves_adapter=where in ("adapter", "base"))
    manager._base_sent = where == "adapter"
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        asyncio.run(manager.finish(["kv_cache"]) if where == "finish" else manager.update_weights([], 1))
    assert time.monotonic() - started < (2.5 if where == "finish" else 1.5) * WAIT
    text = same_everywhere(str(caught.value))
    assert gc.isenabled() and (where != "plan" or "no source; garbage is collected: False" in text), text
    assert engine.asked == ([*asked, f"abandon_sync: {text}"] if engine.leader else [])
