# SPDX-License-Identifier: Apache-2.0
"""All ranks come to the same end, in real process groups."""

from __future__ import annotations

import asyncio

import torch.distributed as dist
from worlds import run_world

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.transport.agreement import Agreement

RANKS = 3


def settled(agreement: Agreement, what: str) -> str:
    """The error of ``settle``, empty when there is none."""
    try:
        agreement.settle(what)
    except SyncError as error:
        return str(error)
    return ""


def steps() -> list[object]:
    """What one rank hears of steps of which the last rank fails in some."""
    agreement, last = Agreement(20.0), dist.get_rank() == dist.get_world_size() - 1
    heard: list[object] = []
    begun: list[str] = []

    def work(what: str, fails: bool = False) -> int:
        begun.append(what)
        if fails:
            raise ValueError(f"injected: {what}")
        return dist.get_rank()

    heard.append(agreement.step("first", lambda: work("first")))
    heard.append(agreement.any("second", lambda: last))
    heard.append(agreement.any("third", lambda: False))
    with agreement.attempt():
        work("before", fails=last)
    for what in ("after", "again"):
        try:
            heard.append(agreement.step(what, lambda what=what: work(what)))
        except SyncError as error:
            heard.append(str(error).splitlines()[-1])
    return [*heard, begun]


def test_every_rank_takes_a_step_or_none() -> None:
    first, last = run_world(2, steps, timeout=40)
    said = "rank 1: ValueError: injected: before"
    assert first == [0, True, False, said, 0, ["first", "before", "after", "again"]]
    assert last == [1, True, False, said, 1, ["first", "before", "again"]], "a rank that failed before does not begin"


def cancelled() -> tuple[str, str, str]:
    """What ends a step that rank 0 is cancelled in, its text, and a later agreement."""
    agreement, first = Agreement(20.0), dist.get_rank() == 0

    async def ended() -> tuple[str, str]:
        task = asyncio.ensure_future(agreement.step_async("waking", lambda: asyncio.sleep(600.0 if first else 0.0)))
        await asyncio.sleep(0.5)
        if first:
            task.cancel()
        try:
            await task
        except (Exception, asyncio.CancelledError) as error:
            return type(error).__name__, str(error)
        return "", ""

    return *asyncio.run(ended()), settled(agreement, "later")


def test_a_cancelled_rank_is_cancelled_and_the_others_hear_of_it() -> None:
    (leader, _, later), (other, text, same) = run_world(2, cancelled, timeout=60)
    assert (leader, other) == ("CancelledError", "SyncError")
    assert "rank 0: RuntimeError: this rank was cancelled" in text
    assert later == same == "", "nothing is left of it for the next stage"
