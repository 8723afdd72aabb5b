# SPDX-License-Identifier: Apache-2.0
"""Generation waits for a sync and is refused after a failed one; memory is asked for once and with a bound."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from verl_sync_plugin.config.settings import KEY_PREFIX
from verl_sync_plugin.rollouts.gate import Occupation, WeightsGate

BOUND = 0.3


async def waits(gate: WeightsGate) -> Any:
    """Who enters and has to wait."""
    entering = asyncio.create_task(gate.enter())
    await asyncio.sleep(0.01)
    assert not entering.done()
    return entering


def test_who_enters_waits_for_the_end_of_a_sync_or_hears_that_it_failed() -> None:
    async def story() -> None:
        gate = WeightsGate()
        await gate.enter()
        number = gate.begin()
        waiting = await waits(gate)
        gate.succeed(number)
        await waiting
        gate.begin()
        waiting = await waits(gate)
        gate.fail("rank 1: out of memory")
        for late in (waiting, gate.enter()):
            with pytest.raises(RuntimeError, match="half written: rank 1: out of memory"):
                await late
        gate.fail("", gate.begin())
        with pytest.raises(RuntimeError, match="half written"):
            await gate.enter()
        gate.succeed(gate.begin())
        await gate.enter()

    asyncio.run(story())


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_needs_a_sync_waits_for_its_first_one(fails: bool) -> None:
    async def story() -> None:
        gate = WeightsGate(needs_sync=True)
        with pytest.raises(RuntimeError, match=r"waited 0\.01 s for its first sync; call"):
            await gate.first_sync(0.01)
        waiting = asyncio.create_task(gate.first_sync(1))
        number = gate.begin()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "it is half written"
        (gate.fail if fails else gate.succeed)(*(["injected"] if fails else []), number)
        await waiting

    asyncio.run(story())


def test_a_sync_that_was_given_up_does_not_succeed_later() -> None:
    """A server that was stopped in the last step of a sync goes on with it, and finds that it was given up."""

    async def story() -> None:
        gate = WeightsGate()
        number = gate.begin()
        gate.fail("no answer")
        with pytest.raises(RuntimeError, match="gave this sync up"):
            gate.succeed(number)
        with pytest.raises(RuntimeError, match="half written: no answer"):
            await gate.enter()

    asyncio.run(story())


def test_a_pause_lasts_until_it_is_ended_whatever_is_synced_meanwhile() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.hold()
        waiting = await waits(gate)
        gate.succeed(gate.begin())
        gate.let_go()
        gate.hold()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "a pause that begins as one ends holds who waited"
        gate.let_go()
        await waiting
        gate.hold()
        waiting = await waits(gate)
        gate.begin()
        gate.fail("another rank failed")
        with pytest.raises(RuntimeError, match="half written: another rank failed"):
            await waiting

    asyncio.run(story())


class Memory:
    """An engine's: answers when it is told to, after ``hangs`` requests that get no answer before."""

    def __init__(self, hangs: int = 1) -> None:
        self.asked: list[str] = []
        self.hangs, self.goes_on, self.fails = hangs, asyncio.Event(), False
        self.occupation = Occupation("SGLang", BOUND)

    async def _answer(self, asked: str) -> None:
        self.asked.append(asked)
        self.hangs -= 1
        if self.hangs >= 0:
            await self.goes_on.wait()
            if self.fails:
                raise RuntimeError("injected: SGLang refused")

    async def release(self, *tags: str) -> None:
        await self.occupation.release(list(tags), lambda todo: self._answer(f"release {','.join(todo)}"))

    async def resume(self, *tags: str) -> None:
        await self.occupation.resume(list(tags), lambda todo: self._answer(f"resume {','.join(todo)}"))


async def times_out(call: Any, what: str) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"SGLang did not {what} .*{KEY_PREFIX}\.timeout_seconds=0\.3"):
        await call
    assert BOUND * 0.9 < time.monotonic() - before < BOUND + 2  # an event loop's timer may end a little early


def test_what_was_released_late_is_known_to_be_released() -> None:
    """A second pause would end SGLang's process, and a resume without release its scheduler."""

    async def story() -> None:
        memory = Memory()
        await times_out(memory.release("kv_cache", "weights"), "release kv_cache, weights")
        await times_out(memory.resume("weights"), "resume weights")
        assert memory.asked == ["release kv_cache,weights"], "an engine that hangs is asked for nothing more"
        memory.goes_on.set()
        for change in (memory.release, memory.resume, memory.resume, memory.release):
            await change("weights")
        assert memory.asked[1:] == ["resume weights", "release weights"]

    asyncio.run(story())


def test_what_was_asked_late_and_failed_is_asked_again_and_who_gave_up_is_not_served_later() -> None:
    async def story() -> None:
        memory = Memory()
        memory.occupation.released, memory.fails = frozenset({"kv_cache", "weights"}), True
        calls = [memory.resume("weights"), memory.resume("kv_cache")]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 2
        memory.goes_on.set()
        await asyncio.sleep(0)
        await memory.resume("weights")
        assert memory.asked == ["resume weights"] * 2 and memory.occupation.released == {"kv_cache"}

    asyncio.run(story())
