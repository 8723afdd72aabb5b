# SPDX-License-Identifier: Apache-2.0
"""Holds requests back, and tracks the engine's released memory; in the server's process, for any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.errors import HalfWrittenError

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # verl's tags of an engine's memory
Ask = Callable[[list[str]], Awaitable[Any]]


class WeightsGate:
    """Open; closed while a sync is under way, generation is paused or memory is released; or locked after a failed
    sync. Syncs are numbered: the last step of one that was given up may end while the next is under way.
    ``needs_sync``: nothing is generated from the weights that the engine began with."""

    def __init__(self, needs_sync: bool) -> None:
        self.syncing = False  # a sync is under way that nobody has given up
        self.number = 0
        self._held, self._there, self._lost = False, True, needs_sync
        self._failure: str | None = None
        self._opened = asyncio.Event()  # for who waits now

    def begin(self) -> int:
        """Closes the gate: a sync starts. Returns its number."""
        self.number += 1
        self.syncing = True
        return self.number

    def refuse_given_up(self, number: int) -> None:
        """Raises RuntimeError when the sync of this number is not under way any more: the trainer has said that it has
        failed, whatever a server that was late has come to."""
        if number != self.number or not self.syncing:
            raise RuntimeError("the trainer gave this sync up while the engine was at it")

    def succeed(self, number: int) -> None:
        """Ends the sync of this number, unless it was given up: the weights are whole."""
        self.refuse_given_up(number)
        self._lost = False
        self._end(None)

    def fail(self, why: str, number: int | None = None) -> None:
        """Locks the gate: the sync was given up, and the weights may be half written until a later one succeeds.
        ``why`` is for whoever wants to generate. If another sync than ``number`` has begun since, nothing happens; it
        is the last one's by default."""
        if number in (None, self.number):
            self._end(why)

    def _end(self, failure: str | None) -> None:
        self._failure, self.syncing = failure, False
        self._wake()

    def hold(self) -> None:
        """Closes the gate until ``let_go``: the engine's generation is paused, whether or not a sync follows."""
        self._held = True

    def let_go(self) -> None:
        self._held = False
        self._wake()

    def memory(self, there: bool) -> None:
        """Closes the gate until all of the engine's memory is there."""
        self._there = there
        self._wake()

    def lose_weights(self) -> None:
        """Closes the gate until a sync succeeds: the engine's weights are released, or written over."""
        self._lost = True

    def _wake(self) -> None:
        """Wakes all who wait."""
        self._opened.set()
        self._opened = asyncio.Event()

    @property
    def closed(self) -> str:
        """The reason why nothing may be generated now; empty where it may."""
        reasons = {
            "a sync is under way": self.syncing,
            f"the rollout engine's weights are half written: {self._failure}": self._failure is not None,
            "generation is paused": self._held,
            "the engine's memory is released: resume it first": not self._there,
            "the engine has no synced weights: sync weights first": self._lost,
        }
        return next((why for why, applies in reasons.items() if applies), "")

    async def enter(self) -> None:
        """Waits, as a request in SGLang's own queue would, while a sync is under way, generation is paused or memory is
        released, and for the next sync where the engine has no synced weights. Raises HalfWrittenError where the
        last sync failed. Yields to no other task where there is nothing to wait for."""
        while self.closed and (self.syncing or self._failure is None):
            await self._opened.wait()
        self._refuse_half_written()

    async def rest(self, seconds: float) -> None:
        """Waits until no sync is under way. Raises HalfWrittenError where the last one failed, or the one under way
        does not end within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self.syncing:
                    await self._opened.wait()
        except TimeoutError:
            raise HalfWrittenError(
                f"the rollout engine's weights may be half written: a sync has been under way for {seconds:g} s, and "
                "nobody has said that it is over; look for the trainer or rollout rank that died, and sync again"
            ) from None
        self._refuse_half_written()

    def _refuse_half_written(self) -> None:
        if self._failure is not None:
            raise HalfWrittenError(self.closed)


class Occupation:
    """Keeps account of the engine's released memory (``released``: its tags), and of the request that changes it.

    A repeated sleep and a wake without sleep, which engines take badly, are harmless here. A request that takes longer
    than its bound cannot be taken back: its outcome is noted when it comes, and until then nothing else is asked.

    Args:
        engine: its name.
        timeout_seconds: bound on every call, its wait for the ones before included.
        memory: is called with whether all memory is there: False before any change, and after every answer.
    """

    def __init__(self, engine: str, timeout_seconds: float, memory: Callable[[bool], None]) -> None:
        self._engine, self._timeout, self._memory = engine, timeout_seconds, memory
        self._turn = asyncio.Lock()  # whoever asks the engine holds it until the engine has answered
        self.released: frozenset[str] = frozenset()

    async def change(self, what: Literal["release", "resume"], tags: list[str], ask: Ask) -> None:
        """Releases what is still resident of ``tags``, or resumes what is released of them; ``ask`` has the engine do
        it. Raises TimeoutError where the engine has not answered in time, or not what was asked before."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._turn.acquire()
                await asyncio.shield(asyncio.ensure_future(self._asked(what, tags, ask)))
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._engine} did not {what} {', '.join(tags)} within {KEY_PREFIX}.timeout_seconds="
                f"{self._timeout:g}; see its log, and set the key higher if it only takes long"
            ) from error

    async def _asked(self, what: str, tags: list[str], ask: Ask) -> None:
        try:
            if wanted := [tag for tag in tags if (tag in self.released) == (what == "resume")]:
                self._memory(False)
                await ask(wanted)
                self.released = self.released - {*wanted} if what == "resume" else self.released | {*wanted}
        finally:
            self._memory(not self.released)
            self._turn.release()
