# SPDX-License-Identifier: Apache-2.0
"""What the server actor makes of an SGLang that does not answer in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ordered_manager import Make, Manager

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.sglang.awake import KV_CACHE, WEIGHTS

BOUND = 0.3
BOTH = f"{KV_CACHE},{WEIGHTS}"


async def times_out(call: Any, what: str) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"SGLang did not {what} .*{KEY_PREFIX}\.timeout_seconds=0\.3"):
        await call
    assert BOUND * 0.9 < time.monotonic() - before < BOUND + 2  # an event loop's timer may end a little early


def test_a_sleep_without_an_answer_ends_in_an_error_that_names_the_key(hybrid_server: Make) -> None:
    async def sleep() -> None:
        manager = Manager()
        server = hybrid_server(manager, timeout_seconds=BOUND)
        manager.hangs = 1
        await times_out(server.sleep(), "release kv_cache, weights")
        await times_out(server.resume_tags([WEIGHTS]), "resume weights")
        await times_out(server.sleep(), "release kv_cache, weights")
        assert manager.asked == [f"release {BOTH}"], "an engine that hangs is asked for nothing more"

    asyncio.run(sleep())


def test_what_was_released_late_is_known_to_be_released(hybrid_server: Make) -> None:
    """A second pause would end SGLang's process, and a resume without release its scheduler."""

    async def sleep() -> None:
        manager = Manager()
        server = hybrid_server(manager, timeout_seconds=BOUND)
        manager.hangs = 1
        await times_out(server.sleep(), "release")
        manager.goes_on.set()
        await server.sleep()
        await server.resume_tags([WEIGHTS])
        await server.resume_tags([WEIGHTS])
        await server.sleep()
        assert manager.asked == [f"release {BOTH}", f"resume {WEIGHTS}", f"release {WEIGHTS}"]

    asyncio.run(sleep())


def test_what_was_asked_late_and_failed_is_asked_again(hybrid_server: Make) -> None:
    async def wake() -> None:
        manager = Manager()
        server = hybrid_server(manager, (KV_CACHE, WEIGHTS), BOUND)
        manager.hangs, wait = 1, manager.goes_on.wait

        async def failing() -> None:
            await wait()
            raise RuntimeError("injected: SGLang refused")

        manager.goes_on.wait = failing  # type: ignore[method-assign, assignment]
        await times_out(server.resume_tags([WEIGHTS]), "resume weights")
        manager.goes_on.set()
        await server.resume_tags([WEIGHTS])
        assert manager.asked == [f"resume {WEIGHTS}"] * 2
        assert server.occupation.state.released == {KV_CACHE}

    asyncio.run(wake())


def test_who_has_waited_in_vain_is_not_served_later(hybrid_server: Make) -> None:
    async def wake() -> None:
        manager = Manager()
        server = hybrid_server(manager, (KV_CACHE, WEIGHTS), BOUND)
        manager.hangs = 1
        calls = [server.resume_tags([WEIGHTS]), server.resume_tags([KV_CACHE]), server.sleep()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 3
        manager.goes_on.set()
        await asyncio.sleep(BOUND)
        assert manager.asked == [f"resume {WEIGHTS}"] and server.occupation.state.released == {KV_CACHE}

    asyncio.run(wake())
