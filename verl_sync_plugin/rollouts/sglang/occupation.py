# SPDX-License-Identifier: Apache-2.0
"""SGLang's memory occupation: serializes releases and resumes, never repeats a pending one, bounds every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.awake import AwakeState

Ask = Callable[[list[str]], Awaitable[Any]]


class Occupation:
    """Which memory of the engine is released, and the request under way that changes it.

    A request that takes longer than its bound cannot be taken back, so it goes on alone: whatever comes of it is noted
    when it comes, and until then nothing else is asked of the engine.

    Args:
        timeout_seconds: bound on every call, its wait for the ones before included.
        memory: is told whether all memory is there: that it is not, before SGLang is asked to change anything, and
            behind every answer of SGLang's what is so now.

    Attributes:
        state: what is released, for all that the engine has answered.
    """

    def __init__(self, timeout_seconds: float, memory: Callable[[bool], None] = lambda there: None) -> None:
        self._timeout = timeout_seconds
        self._memory = memory
        self._turn = asyncio.Lock()
        self._asked: asyncio.Future[None] | None = None
        self.state = AwakeState()

    async def release(self, tags: list[str], ask: Ask) -> None:
        """Releases what is still resident of ``tags``.

        Args:
            tags: of the memory.
            ask: has SGLang do it.

        Raises:
            TimeoutError: SGLang has not answered in time, or not what was asked before.
        """
        await self._bounded("release", tags, self._change(tags, self.state.to_release, ask, self.state.note_released))

    async def resume(self, tags: list[str], ask: Ask) -> None:
        """Resumes what is released of ``tags``; arguments and errors as of ``release``."""
        await self._bounded("resume", tags, self._change(tags, self.state.to_resume, ask, self.state.note_resumed))

    async def _bounded(self, what: str, tags: list[str], change: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(change, self._timeout)
        except asyncio.TimeoutError as error:  # not the built-in one before Python 3.11
            raise TimeoutError(
                f"SGLang did not {what} {', '.join(tags)} within {KEY_PREFIX}.timeout_seconds={self._timeout:g}; "
                "see its log, and set the key higher if it only takes long"
            ) from error

    async def _change(
        self, tags: list[str], todo: Callable[[list[str]], list[str]], ask: Ask, note: Callable[[list[str]], None]
    ) -> None:
        async with self._turn:
            if self._asked is not None:  # by a call that has not waited for it to the end
                with suppress(Exception):
                    await asyncio.shield(self._asked)
            wanted = todo(tags)
            if wanted:
                self._asked = asyncio.ensure_future(self._noted(wanted, ask, note))
                await asyncio.shield(self._asked)
            self._asked = None

    async def _noted(self, tags: list[str], ask: Ask, note: Callable[[list[str]], None]) -> None:
        self._memory(False)
        try:
            await ask(tags)
            note(tags)
        finally:
            self._memory(not self.state.released)
