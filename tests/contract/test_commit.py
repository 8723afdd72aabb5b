# SPDX-License-Identifier: Apache-2.0
"""The commit of a sync between real ranks: what is asked, in which order, and what is given back."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
import torch
from test_lora_adapter import Engine
from worlds import run_world

from contract.sources import WorldSource, everyone
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.commit import Commit
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.choice import Choice
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Coverage, Used

CPU = torch.device("cpu")


def committed(fails: bool, used: Used | None) -> list[str]:
    """What happens, in this order, when the engine rank answers a commit or does not."""
    agreement, sender = Agreement(20.0), BucketSender(CPU, 20.0)
    config, happened = SyncConfig(), list[str]()
    choice = Choice(config, agreement, sender, CPU)
    commit = Commit(config, agreement, sender, choice, Engine())
    settle, gather = agreement.settle, agreement.gather

    def settling(what: str, waiting: bool = False) -> bool:
        happened.append(what)
        return settle(what, waiting)

    def gathering(what: str, value: Any) -> list[Any]:
        happened.append(what)
        return gather(what, value)

    def answer(tell: bool, unmap: bool) -> Committed:
        if fails:
            raise RuntimeError("injected")
        return Committed(Coverage(1, ()), used=used)

    sync = Sync("1", Plan((), (), ""), WorldSource(), [], SyncReport(), everyone(), everyone())
    with (
        mock.patch.object(agreement, "settle", settling),
        mock.patch.object(agreement, "gather", gathering),
        mock.patch.object(sender, "commit", answer),
        mock.patch.object(sender, "unstage", lambda: happened.append("unstage")),
    ):
        try:
            asyncio.run(commit.run(sync, choice.direct, None))
        except SyncError as error:
            happened.append(str(error).splitlines()[-1])
    return happened


def test_staging_goes_once_all_engine_ranks_have_unmapped_it() -> None:
    """Also when the commit failed: engine ranks would open the same export for the second time."""
    (happened,) = run_world(1, committed, False, None)
    assert happened[:2] == ["committing", "unstage"]
    (happened,) = run_world(1, committed, True, None)
    assert happened == ["committing", "unstage", "rank 0: RuntimeError: injected"]


def known_behind_a_failure() -> list[bool]:
    """Whether the checks still take for known what the engine rank tells once, when its answer did not come."""
    agreement, sender = Agreement(20.0), BucketSender(CPU, 20.0)
    choice = Choice(SyncConfig(), agreement, sender, CPU)
    commit, plan = Commit(SyncConfig(), agreement, sender, choice, Engine()), Plan((), (), "plan")
    commit._hashes._learned, commit._hashes._digest, commit._destination._known = True, plan.digest, plan.digest
    checks = commit._hashes, commit._destination
    assert all(check.knows(plan) for check in checks)
    sync = Sync("1", plan, WorldSource(), [], SyncReport(), everyone(), everyone())
    with mock.patch.object(sender, "commit", side_effect=TimeoutError("injected")), pytest.raises(SyncError):
        asyncio.run(commit.run(sync, choice.direct, None))
    return [check.knows(plan) for check in checks]


def test_what_an_engine_rank_tells_once_is_asked_again_behind_a_failure() -> None:
    assert run_world(1, known_behind_a_failure) == [[False, False]]
