# SPDX-License-Identifier: Apache-2.0
"""Generation waits for a sync and is refused after a failed one; memory is asked for once and with a bound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_sync_plugin.rollouts.gate import Occupation, WeightsGate

BOUND = 0.3


async def waits(gate: WeightsGate) -> Any:
    """Who enters and has to wait."""
    entering = asyncio.create_task(gate.enter())
    await asyncio.sleep(0.01)
    assert not entering.done()
    return entering


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

    async def resume(self, *tags: str) -> None:
        await self.occupation.resume(list(tags), lambda todo: self._answer(f"resume {','.join(todo)}"))


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
