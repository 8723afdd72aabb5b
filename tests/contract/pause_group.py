# SPDX-License-Identifier: Apache-2.0
"""A trainer rank, a rollout rank and an engine between which only Ray's calls are not Ray's, and a sync of theirs that
stands still."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch

from bare_engine.endpoint import BareEngine
from contract.pause_processes import ServedRollout, TaughtTrainer
from contract.pause_world import STALL, Models
from faults.actor import serve
from ports import free_port
from separate.driver import Driver, Failure, Member, together
from verl_sync_plugin.rollouts.sglang.request import dumps


class Group:
    """A trainer rank, a rollout rank and the engine, whose server is another one in each test.

    Attributes:
        server: ours of now.
        report: what the rollout rank said of the last sync.
    """

    def __init__(self, engine: BareEngine, models: Models, folder: Path) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self._models = models
        self._trainer = Member(TaughtTrainer, free_port(), models.path, folder)
        self._rollout = Member(ServedRollout, free_port(), models.path, theirs)
        self._driver = Driver([self._trainer])
        self._joined = False
        self.server: Any = None
        self.report: dict[str, Any] = {}
        serve(self, ours, engine.engine.loop)

    def __getattr__(self, method: str) -> Any:
        """The rollout rank's calls are the server's."""
        return getattr(self.server, method)

    def ready(self) -> None:
        assert [self._trainer.answer(), self._rollout.answer()] == ["ready", "ready"]

    async def learn(self, version: int) -> None:
        """The trainer's weights become others."""
        await asyncio.to_thread(self._told, [self._trainer], "learn", self._models.checkpoints[version])

    async def read_in_place(self, wanted: bool) -> None:
        """Whether the next syncs are read where the trainer's parameters lie."""
        await asyncio.to_thread(self._told, [self._trainer, self._rollout], "read_in_place", wanted)

    async def sync(self, version: int) -> None:
        """The driver's calls: the sync alone, unless it is the first of the group.

        Raises:
            RuntimeError: it failed.
        """
        first, self._joined = not self._joined, False
        if first:
            await self.server.abort_all_requests()
            await self.server.release_kv_cache()
        await asyncio.to_thread(self._sync, version, first)
        self._joined = True
        if first:
            await self.server.resume_kv_cache()
            await self.server.resume_generation()

    def _sync(self, version: int, first: bool) -> None:
        everyone = [self._trainer, self._rollout]
        said = self._driver.sync(version, [self._rollout]) if first else together(everyone, "sync", version)
        for each in said:
            if each is None or isinstance(each, Failure):
                raise RuntimeError(str(each))
        self.report = said[1]

    def _told(self, members: list[Member], method: str, *args: Any) -> None:
        assert together(members, method, *args) == [None] * len(members)

    def end(self) -> None:
        self._rollout.end()
        self._trainer.end()


class Stall:
    """A sync that stands still with half of the weights written."""

    def __init__(self, engine: BareEngine, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    async def arm(self) -> None:
        """While no request is in flight."""
        await self._engine._update(dumps([(str(self._folder), torch.empty(0))]), STALL, None)

    async def reached(self, syncing: asyncio.Task[None]) -> None:
        """Waits until it stands still."""
        stalled = self._folder / "stalled"
        while not stalled.exists():
            if syncing.done():
                await syncing
            assert not syncing.done(), "the sync did not stand still"
            await asyncio.sleep(0.005)
        found = json.loads(stalled.read_text())
        assert found["written"] > 0 < found["left"], found

    def end(self, failure: str = "") -> None:
        """It goes on, or fails."""
        unseen = self._folder / "go.part"
        unseen.write_text(failure)
        unseen.rename(self._folder / "go")
