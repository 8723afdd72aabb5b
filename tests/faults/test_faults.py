# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault in every place, at every stage and in every kind of sync, on real parts."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.cells import LOADED, Cell, matrix
from faults.points import SLOW_SECONDS
from ports import free_port
from separate.driver import Failure, Member, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMOKE = (
    Cell("trainer", "pack", "oom", "second"),
    Cell("engine", "load", "error", "in place"),
    Cell("server", "commit", "error", "first"),
    Cell("engine", "connect", "error", "second"),
    Cell("leader", "hand over", "slow", "in place"),
    Cell("engine", "verify", "error", "first"),
    Cell("leader", "compare", "error", "second"),
    Cell("engine", "commit", "stop", "second"),
    Cell("trainer", "commit", "kill", "in place"),
)
RESTART = "restart"
SYNCS_BEFORE = {"first": 0, "second": 1, "in place": 2}


class World:
    """Two trainer ranks and a server with an engine of two ranks; lasts until a cell does not leave it ``whole``."""

    def __init__(self, model: str, folder: Path) -> None:
        port = free_port()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self.server = Member("faults.processes.Server", model, str(folder), theirs)
        self.trainers = [
            Member("faults.processes.Trainer", rank, port, model, str(folder), (ours, None)[rank]) for rank in range(2)
        ]
        ours.close()
        theirs.close()
        self._processes: list[psutil.Process] = []
        self._version, self._new = 0, ""  # of the sync under way
        self.whole = False

    def _begin(self) -> None:
        assert [each.answer() for each in (self.server, *self.trainers)] == ["ready"] * 3
        self._processes = psutil.Process(self.server.process.pid).children(recursive=True)
        sets = {name: self._trainers("save", name)[0] for name in "AB"}
        assert self.server.ask("learn", sets).answer() is None

    def _trainers(self, method: str, *args: Any) -> list[Any]:
        return together(self.trainers, method, *args)

    def _of(self, cell: Cell) -> Member:
        return self.server if cell.place in ("engine", "server") else self.trainers[cell.heard_by]

    def close(self) -> None:
        """Ends all of it."""
        for member in (self.server, *self.trainers):
            member.process.kill()
        for process in self._processes:
            if process.is_running():
                process.kill()
        for member in (self.server, *self.trainers):
            member.process.join()

    def run(self, cell: Cell) -> None:
        """Plays a cell from the first sync that both sides know of, and checks all that is promised of it."""
        if not self.whole:
            self._begin()
        self.whole = False
        delivery = "auto" if cell.sync == "in place" else "staged"
        assert [*self._trainers("begin", delivery), self.server.ask("arm", "", "").answer()] == [None] * 3
        self._trainers("put", "A")
        ways = [self._healthy() for _ in range(SYNCS_BEFORE[cell.sync])]
        assert ways == ["staged", "in place"][: len(ways)], ways
        old = self.server.ask("holds").answer()
        assert old in ("A", "B"), old
        self._new = "A" if old == "B" else "B"
        self._trainers("put", self._new)
        self._arm(cell)
        started = time.monotonic()
        answers = self._faulty(cell)
        text = self._check(cell, answers, time.monotonic() - started, {old, self._new})
        if cell.must_restart:
            self._check_restart(cell, text)
        else:
            self._healthy()  # the next sync is exact, and requests are answered from it
            assert self.server.ask("holds").answer() == self._new, "the sync is not exact"
            assert self.server.ask("answers").answer() == "an answer"
            self.whole = True

    def _healthy(self) -> str:
        """A sync that must succeed, as verl makes it."""
        answers = self._sync()
        assert answers in (["staged"] * 2, ["in place"] * 2), answers
        return str(answers[0])

    def _sync(self) -> list[Any]:
        self._version += 1
        assert self.server.ask("sleep").answer() is None
        return self._trainers("sync", self._version)

    def _arm(self, cell: Cell) -> None:
        method = "arm_server" if cell.place == "server" else "arm"
        assert self.server.ask("sleep").answer() is None
        assert self._of(cell).ask(method, cell.stage, cell.kind).answer() is None

    def _faulty(self, cell: Cell) -> list[Any]:
        """Answers of the trainer ranks that are there; what was stopped goes on when the others have ended."""
        self._version += 1
        for each in self.trainers:
            each.ask("sync", self._version)
        away = cell.heard_by if cell.group_is_lost else None
        answers: list[Any] = [None, None]
        for rank, each in enumerate(self.trainers):
            if rank != away:
                answers[rank] = each.answer(cell.bound + 60)
        if cell.kind == "stop":
            self._go_on(cell)
        if cell.group_is_lost and cell.kind != "kill":
            assert isinstance(self.trainers[cell.heard_by].answer(), Failure), "the group went on without this rank"
        return answers

    def _go_on(self, cell: Cell) -> None:
        stopped = [psutil.Process(self._of(cell).process.pid)]
        if cell.place == "engine":
            stopped = [each for each in self._processes if each.is_running() and "scheduler_TP1" in each.name()]
        assert [each.status() for each in stopped] == [psutil.STATUS_STOPPED], f"{cell}: the fault did not happen"
        stopped[0].resume()

    def _check(self, cell: Cell, answers: list[Any], seconds: float, allowed: set[str]) -> str:
        """Returns the error of the sync; empty when it succeeded."""
        print(f"{cell}: {seconds:.1f} s {answers}", flush=True)
        assert seconds < cell.bound, f"{seconds:.1f} s of {cell.bound:.1f}"
        present = [answer for rank, answer in enumerate(answers) if not (cell.group_is_lost and rank == cell.heard_by)]
        text = ""
        if cell.kind == "slow":
            assert present in (["staged"] * 2, ["in place"] * 2), present
            assert seconds >= SLOW_SECONDS, f"{cell}: the fault did not happen"
        else:
            assert all(isinstance(answer, Failure) for answer in present), present
            assert len({answer.text for answer in present}) == 1, present
            text = present[0].text
            self._check_text(cell, present[0])
        self._check_trainers(cell)
        holds, request = self._served(cell)
        assert cell.stage not in LOADED or holds in (self._new, ""), "the engine had all weights"
        # Nobody tells the server when the leading rank is gone: it answers while nothing is asked of it, and then waits
        untold = cell.place == "leader" and cell.group_is_lost
        if request == "an answer":
            assert holds in allowed, f"it answers with {holds}"
            assert not text or untold, "the sync has failed, and requests are answered"
        elif request:
            assert request == "a refusal" or untold, request
        assert text or (holds, request) == (self._new, "an answer")
        return text

    def _check_text(self, cell: Cell, failure: Failure) -> None:
        """It names the place and the stage as closely as those who are left can know them."""
        text = failure.text
        if cell.group_is_lost:
            assert failure.kind == "RankLostError" and "a rank died or did not reach" in text and RESTART in text, text
            return
        assert failure.kind == "SyncError" and f"rank {cell.heard_by}: " in text, failure
        if cell.kind in ("error", "oom") and not (cell.ends_sglang or cell.unheard):
            assert f"injected: {cell.kind} at {cell.stage!r} in the {cell.place}" in text, text

    def _check_trainers(self, cell: Cell) -> None:
        for rank, each in enumerate(self.trainers):
            if not (cell.kind == "kill" and cell.group_is_lost and rank == cell.heard_by):
                assert each.ask("holds", self._new).answer() is True, "the sync changed the trainer"
                if self._of(cell) is each:
                    assert each.ask("fired").answer() is True, f"{cell}: the fault did not happen"

    def _served(self, cell: Cell) -> tuple[str, str]:
        """Returns what the engine holds, and what a request gets; empty texts for an engine that is gone."""
        if cell.must_restart and cell.place in ("engine", "server"):
            return "", ""
        request = self.server.ask("answers").answer()
        return self.server.ask("holds").answer(), request

    def _check_restart(self, cell: Cell, text: str) -> None:
        """The error says that the run must be restarted; if not at once, then that of the next sync."""
        if RESTART not in text:
            answers = self._trainers("sync", self._version + 1)
            print(f"{cell}, the next sync: {answers}", flush=True)
            assert all(isinstance(answer, Failure) and RESTART in answer.text for answer in answers), answers


Play = Callable[[Cell], None]


@pytest.fixture(scope="module")
def play(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Plays a cell in the world that the last one left whole, or in a new one."""
    whole: list[World] = []

    def in_a_world(cell: Cell) -> None:
        world = whole.pop() if whole else World(tiny_model("qwen2"), tmp_path_factory.mktemp("world"))
        try:
            world.run(cell)
        finally:
            if world.whole:
                whole.append(world)
            else:
                world.close()

    yield in_a_world
    for world in whole:
        world.close()


@pytest.mark.parametrize("cell", SMOKE, ids=str)
def test_some_faults_end_as_promised(cell: Cell, play: Play) -> None:
    play(cell)


@pytest.mark.faults
@pytest.mark.parametrize("cell", matrix(), ids=str)
def test_every_fault_ends_as_promised(cell: Cell, play: Play) -> None:
    play(cell)
