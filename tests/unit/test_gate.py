# SPDX-License-Identifier: Apache-2.0
"""Generation waits for a sync and is refused after a failed one; memory is asked for once and with a bound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_sync_plugin.rollouts.gate import WeightsGate

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
