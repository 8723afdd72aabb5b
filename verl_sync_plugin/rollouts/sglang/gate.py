# SPDX-License-Identifier: Apache-2.0
"""The gate before generation: whether the engine's weights may be generated from."""

from __future__ import annotations

import asyncio

from verl_sync_plugin.errors import HalfWrittenError


class WeightsGate:
    """Open, closed while a sync is under way or generation is paused, or locked after a failed sync."""

    def __init__(self) -> None:
        self._passable = asyncio.Event()
        self._passable.set()
        self._at_rest = asyncio.Event()  # no sync is under way
        self._at_rest.set()
        self._held = False
        self._failure: str | None = None

    @property
    def syncing(self) -> bool:
        """Whether a sync is under way that nobody has given up."""
        return not self._at_rest.is_set()

    def begin(self) -> None:
        """Closes the gate: a sync starts, and whoever enters now waits for its end."""
        self._at_rest.clear()
        self._settle()

    def succeed(self) -> None:
        """Ends the sync: it succeeded and the weights are whole. One that was given up meanwhile has failed: so the
        trainer has said, whatever a server that was late has come to."""
        if self.syncing:
            self._failure = None
            self._at_rest.set()
            self._settle()

    def fail(self, why: str) -> None:
        """Locks the gate: the sync was given up, and the weights may be half written until a later one succeeds."""
        self._failure = why
        self._at_rest.set()
        self._settle()

    def hold(self) -> None:
        """Closes the gate until ``let_go``: the engine's generation is paused, whether or not a sync follows."""
        self._held = True
        self._settle()

    def let_go(self) -> None:
        """Ends ``hold``."""
        self._held = False
        self._settle()

    def _settle(self) -> None:
        if self.syncing or (self._held and self._failure is None):
            self._passable.clear()
        else:
            self._passable.set()

    async def enter(self) -> None:
        """Waits while a sync is under way or generation is paused, as SGLang's own queue would.

        Raises:
            HalfWrittenError: the last sync failed.
        """
        while not self._passable.is_set():
            await self._passable.wait()
        self.refuse_half_written()

    async def rest(self, seconds: float) -> None:
        """Waits until no sync is under way.

        Raises:
            HalfWrittenError: the last one failed, or the one under way does not end within ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds):
                while self.syncing:
                    await self._at_rest.wait()
        except TimeoutError:
            raise HalfWrittenError(
                f"the rollout engine's weights may be half written: a sync has been under way for {seconds:g} s, and "
                "nobody has said that it is over; look for the trainer or rollout rank that died, and sync again"
            ) from None
        self.refuse_half_written()

    def refuse_half_written(self) -> None:
        """Raises HalfWrittenError when the last sync failed."""
        if self._failure is not None:
            raise HalfWrittenError(f"the rollout engine's weights are half written: {self._failure}")
