# SPDX-License-Identifier: Apache-2.0
"""The gate before generation: whether the engine's weights may be generated from."""

from __future__ import annotations

import asyncio


class WeightsGate:
    """Open, closed while a sync is under way, or locked after a failed one."""

    def __init__(self) -> None:
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: str | None = None

    def begin(self) -> None:
        """Closes the gate: a sync starts, and whoever enters now waits for its end."""
        self._idle.clear()

    def succeed(self) -> None:
        """Opens the gate: the sync succeeded and the weights are whole."""
        self._failure = None
        self._idle.set()

    def fail(self, why: str) -> None:
        """Locks the gate: the sync was given up, and the weights may be half written until a later one succeeds."""
        self._failure = why
        self._idle.set()

    async def enter(self) -> None:
        """Waits while a sync is under way, as SGLang's own queue would.

        Raises:
            RuntimeError: the last sync failed.
        """
        await self._idle.wait()
        if self._failure is not None:
            raise RuntimeError(f"the rollout engine's weights are half written: {self._failure}")
