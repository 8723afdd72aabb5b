# SPDX-License-Identifier: Apache-2.0
"""All ranks come to the same end, in real process groups."""

from __future__ import annotations

import pytest
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


def fail_then_succeed(failing: tuple[int, ...]) -> tuple[str, bool, str]:
    agreement = Agreement(20)
    with agreement.attempt():
        if dist.get_rank() in failing:
            raise ValueError(f"broken on {dist.get_rank()}")
    failed = agreement.failed
    return settled(agreement, "packing"), failed, settled(agreement, "the next stage")


@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1, 2)])
def test_failure_is_everybodys_and_forgotten(failing: tuple[int, ...]) -> None:
    results = run_world(RANKS, fail_then_succeed, failing, timeout=60)
    texts = {text for text, _, _ in results}
    assert len(texts) == 1, "every rank must raise the same text"
    (text,) = texts
    assert "failed at 'packing'; trainer weights are unchanged" in text
    for rank in range(RANKS):
        assert (f"rank {rank}: ValueError: broken on {rank}" in text) == (rank in failing)
    assert [failed for _, failed, _ in results] == [rank in failing for rank in range(RANKS)]
    assert [later for _, _, later in results] == [""] * RANKS, "the next settle works again"


def waiting_rounds() -> list[bool]:
    agreement = Agreement(20)
    return [agreement.settle("connecting", waiting=dist.get_rank() == slow) for slow in (0, RANKS - 1, RANKS)]


def test_one_waiting_rank_asks_for_another_round() -> None:
    assert run_world(RANKS, waiting_rounds, timeout=60) == [[True, True, False]] * RANKS


def compare(values: tuple[str, ...]) -> str:
    agreement = Agreement(20)
    try:
        agreement.same_on_all("the plan digest", values[dist.get_rank()])
    except SyncError as error:
        return str(error)
    return ""


def test_disagreement_names_the_ranks() -> None:
    texts = run_world(RANKS, compare, ("a", "b", "a"), timeout=60)
    assert set(texts) == {"weight sync: the ranks disagree on the plan digest: rank 0: a; rank 1: b; rank 2: a"}


def alone() -> tuple[str, str]:
    agreement = Agreement(20)
    agreement.same_on_all("anything", "x")
    with agreement.attempt():
        raise ValueError("lonely")
    return settled(agreement, "packing"), settled(agreement, "packing")


def test_a_single_rank_needs_no_group() -> None:
    ((failed, later),) = run_world(1, alone, timeout=60)
    assert "rank 0: ValueError: lonely" in failed
    assert later == ""


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
