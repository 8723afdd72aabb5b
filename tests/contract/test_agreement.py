# SPDX-License-Identifier: Apache-2.0
"""All ranks come to the same end, also where the engine resumes while the trainer packs, or is silent."""

import asyncio
import gc
import io
import time
from concurrent.futures import Future
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract.sources import WorldSource, everyone, in_a_file, raised_alike, same_everywhere
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sync.delivery import Deliveries, DeliveryRefusedError, Sync
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed

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


class Engine(RolloutEndpoint):
    """Rank 0 leads. ``asked`` has all that the engine was asked for, and what came of it."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(rollout_of("sglang"), None, everyone(), timeout_seconds=WAIT)
        self.leader = dist.get_rank() == 0
        self.asked: list[str] = []
        self.fails = fails

    async def resume(self, tags: list[str]) -> None:
        """Takes its time, in a thread, as a server actor would."""
        self.asked.append(f"asked for {','.join(tags)}")
        await asyncio.to_thread(time.sleep, SECONDS)
        self.asked.append("resumed")
        if self.fails:
            raise RuntimeError("injected: out of memory")

    def _start(self, method: str, *arguments: Any) -> Future[Any]:
        """Answers nothing else of what it is asked."""
        self.asked.append(f"{method}: {arguments[0]}" if method == "abandon_sync" else method)
        return Future()


@on_ranks(2, timeout=60)
def test_packs_while_the_engine_resumes_and_a_failure_of_either_is_everybodys() -> None:
    manager = ShardingManager(None, Engine(), SyncConfig(timeout_seconds=20.0), 1 << 20, CPU)
    agreement, texts, engines = manager.agreement, list[str](), list[Engine]()
    for fails, failing in ((False, -1), (False, 1), (True, -1), (True, 0), (False, -1)):
        manager.endpoint = engine = Engine(fails)
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
            assert stages["update_weights"] >= SECONDS > stages["resume_weights"] >= 0, "waited beyond the packing"
    assert engines[0].asked == (["asked for weights", "packed", "resumed"] if engines[0].leader else ["packed"])
    good, packing, waking, both, again = texts
    assert "failed at 'packing'" in packing and "rank 1: MemoryError: injected: cannot pack" in packing
    assert "failed at 'connecting to the engine'" in waking and "rank 0: RuntimeError: injected: out" in waking
    assert "rank 0: MemoryError" in both and "out of memory" not in both
    assert good == again == "", "nothing is left over from the failures"
    assert all(each.asked.count("resumed") == each.leader for each in engines), "a resume is left under way"


@pytest.mark.parametrize(
    ("where", "asked"),
    [("plan", ["load_weights"]), ("base", ["load_weights"]), ("adapter", []), ("finish", ["finish_sync"])],
)
@on_ranks(2, timeout=60)
def test_a_silent_engine_hears_of_a_failure_once_and_is_waited_for_once(where: str, asked: list[str]) -> None:
    """While it also does not end the load that it was asked for."""

    def unreadable() -> Any:
        raise ValueError(f"no source; garbage is collected: {gc.isenabled()}")

    engine = Engine()
    manager = ShardingManager(None, engine, SyncConfig(timeout_seconds=WAIT), 1 << 20, CPU)
    serves: Any = SimpleNamespace(serves_adapter=where in ("adapter", "base"), device=CPU, name="", model="")
    manager.trainer, manager._base_sent = serves, where == "adapter"
    manager.open_source = unreadable  # type: ignore[method-assign]
    started = time.monotonic()
    call = manager.finish(["kv_cache"]) if where == "finish" else manager.update_weights([], 1)
    text = raised_alike(SyncError, asyncio.run, call)
    assert time.monotonic() - started < (2.5 if where == "finish" else 1.5) * WAIT
    assert gc.isenabled() and (where != "plan" or "no source; garbage is collected: False" in text), text
    assert engine.asked == ([*asked, f"abandon_sync: {text}"] if engine.leader else [])


@pytest.mark.parametrize(("choice", "able", "answers", "sharded", "found"), [
    ("auto", (True, True), ("", ""), True, [False, True, False]),
    ("auto", (True, False), ("", ""), True, [False, False]),
    ("auto", (True, True), ("", "the model loads w itself"), True, [False, False]),
    ("auto", (True, True), ("", ""), False, [False, False]),  # the ranks are on several hosts
    ("staged", (True, True), ("", ""), True, [False, False]),
])  # fmt: skip
@on_ranks(2, timeout=60)
def test_all_ranks_or_none(
    choice: str, able: tuple[bool, bool], answers: tuple[str, str], sharded: bool, found: list[bool], tmp_path: Path
) -> None:
    """Tries two syncs in place, before and after the engine ranks answer, and one after memory was out of reach."""
    agreement, rank = Agreement(20.0), dist.get_rank()
    deliveries = Deliveries(SyncConfig(delivery=choice), agreement, BucketSender(CPU, 20.0))
    run = in_a_file(torch.ones(64), tmp_path) if able[rank] else torch.ones(64)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan, seen = plan_buckets((shards[0].base,), 4096, sharded), list[bool]()
    sync = Sync(plan, WorldSource(), shards, SyncReport(), everyone())

    def chosen() -> bool:
        votes = agreement.vote("choosing the delivery", deliveries.votes(sync)).tolist()
        return deliveries.take(sync, votes) is deliveries.in_place

    with redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            seen.append(chosen())
            deliveries.in_place.note(Committed(obstacle=answers[rank]), plan)
        if seen[-1]:
            assert deliveries.in_place.announced
            deliveries.fall_back(DeliveryRefusedError("injected"))
            seen.append(chosen())
    by_choice = "(not in place: actor_rollout_ref.rollout.custom.sync.delivery=staged)"
    assert (by_choice in said.getvalue()) == (choice == "staged" and rank == 0)
    assert seen == found
