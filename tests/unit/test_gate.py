# SPDX-License-Identifier: Apache-2.0
"""Generation waits for a sync and is refused after a failed one."""

from __future__ import annotations

import asyncio

import pytest

from verl_sync_plugin.rollouts.sglang.gate import WeightsGate


def test_open_at_first() -> None:
    asyncio.run(asyncio.wait_for(WeightsGate().enter(), 1))


def test_an_engine_that_needs_a_sync_waits_for_its_first_one() -> None:
    async def story() -> None:
        gate = WeightsGate(needs_sync=True)
        with pytest.raises(RuntimeError, match=r"waited 0\.01 s for its first sync; call"):
            await gate.first_sync(0.01)
        waiting = asyncio.create_task(gate.first_sync(1))
        number = gate.begin()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "it is half written"
        gate.succeed(number)
        await waiting

    asyncio.run(story())


def test_who_waits_for_a_first_sync_hears_of_its_failure() -> None:
    async def story() -> None:
        gate = WeightsGate(needs_sync=True)
        waiting = asyncio.create_task(gate.first_sync(1))
        gate.fail("rank 1: out of memory", gate.begin())
        await waiting
        with pytest.raises(RuntimeError, match="half written: rank 1: out of memory"):
            await gate.enter()

    asyncio.run(story())


def test_waits_for_the_end_of_a_sync() -> None:
    async def story() -> list[str]:
        gate, order = WeightsGate(), []

        async def generate() -> None:
            await gate.enter()
            order.append("generated")

        gate.begin()
        task = asyncio.create_task(generate())
        await asyncio.sleep(0.01)
        order.append("synced")
        gate.succeed(gate.number)
        await task
        return order

    assert asyncio.run(story()) == ["synced", "generated"]


def test_locked_after_a_failure_until_a_sync_succeeds() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.begin()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.fail("rank 1: out of memory")
        with pytest.raises(RuntimeError, match=r"half written: rank 1: out of memory"):
            await waiting
        with pytest.raises(RuntimeError, match="half written"):
            await gate.enter()
        gate.succeed(gate.begin())
        await gate.enter()

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
        gate.succeed(gate.begin())
        await gate.enter()

    asyncio.run(story())


def test_a_failure_without_a_word_is_one() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.begin()
        gate.fail("")
        with pytest.raises(RuntimeError, match="half written"):
            await gate.enter()

    asyncio.run(story())


def test_a_pause_lasts_until_it_is_ended_whatever_is_synced_meanwhile() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.hold()
        waiting = asyncio.create_task(gate.enter())
        gate.succeed(gate.begin())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.let_go()
        await waiting

    asyncio.run(story())


def test_who_waits_out_a_pause_hears_of_a_failed_sync() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.hold()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.begin()
        gate.fail("another rank failed")
        with pytest.raises(RuntimeError, match="half written: another rank failed"):
            await waiting

    asyncio.run(story())


def test_a_pause_that_begins_as_one_ends_holds_who_waited() -> None:
    async def story() -> None:
        gate = WeightsGate()
        gate.hold()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.let_go()
        gate.hold()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.let_go()
        await waiting

    asyncio.run(story())
