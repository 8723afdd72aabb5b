"""The end of a sync on one trainer rank, with everything around it made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.sync.commit import Ending
from verl_sync_plugin.transport.protocol import Committed, Coverage, Used

LAST = ["ending the engine's update"]


class Around:
    """Agreement, sender, hashes, uses, direct and endpoint in one; notes what happens."""

    restores_uncovered, active = False, True

    def __init__(self, fails: bool, used: Used | None = None) -> None:
        self.happened: list[str] = []
        self._fails = fails
        self._used = used

    @contextmanager
    def attempt(self) -> Iterator[None]:
        with suppress(RuntimeError):
            yield

    def settle(self, what: str, waiting: bool = False) -> bool:
        self.happened.append(what)
        if self._fails:
            raise SyncError(what)
        return waiting

    def commit(self, tell: bool) -> Committed:
        if self._fails:
            raise RuntimeError("post_load_weights")
        return Committed(Coverage(1, ()), used=self._used)

    def unstage(self) -> None:
        self.happened.append("unstage")

    def note(self, *told: object) -> bool:
        return told[0] is not None

    def asks(self, plan: Plan) -> bool:
        return False

    def forget(self) -> None:
        self.happened.append("forget")

    def compare(self, plan: Plan, loaded: bool) -> None:
        self.happened.append(f"compare {loaded}")


@pytest.mark.parametrize("fails", [False, True])
def test_staging_goes_once_all_engine_ranks_have_unmapped_it(fails: bool) -> None:
    """Also when the commit failed: engine ranks would open the same export for the second time."""
    around: Any = Around(fails)
    ending = Ending(SyncConfig(verify_hashes=False), *[around] * 6)
    with suppress(SyncError):
        asyncio.run(ending.commit(Plan((), (), "digest"), SyncReport(), None, first=False))
    assert around.happened[:3] == (["committing", "forget", "unstage"] if fails else ["committing", "unstage", *LAST])


@pytest.mark.parametrize("used", [None, Used("Model", ())])
def test_what_the_engine_uses_is_compared_when_there_is_news(used: Used | None) -> None:
    """Without hashes, too, an exchange between all ranks in every sync would be one too many."""
    around: Any = Around(False, used)
    ending = Ending(SyncConfig(verify_hashes=False), *[around] * 6)
    asyncio.run(ending.commit(Plan((), (), "digest"), SyncReport(), None, first=False))
    assert [what for what in around.happened if "compare" in what] == (["compare True"] if used else [])
