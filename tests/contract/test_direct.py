# SPDX-License-Identifier: Apache-2.0
"""Whether parameters are read where they lie, decided by real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from contract.sources import WorldSource, everyone
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.delivery.base import PeersUnreachableError, Sync
from verl_sync_plugin.sync.delivery.choice import Choice
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed, Coverage

CPU = torch.device("cpu")


def memory_of(shared: bool, folder: str) -> torch.Tensor:
    if not shared:
        return torch.ones(64)
    storage = torch.UntypedStorage.from_file(f"{folder}/{dist.get_rank()}", True, 256)
    return torch.empty(0).set_(storage, 0, (64,)).fill_(1.0)


def decided(choice: str, able: tuple[bool, bool], sharded: bool, folder: str) -> tuple[list[bool], str]:
    """Whether two syncs were direct, before and after the engine has said that it can; and the error."""
    agreement, sender = Agreement(20.0), BucketSender(CPU, 20.0)
    ways = Choice(SyncConfig(delivery=choice), agreement, sender, CPU)
    direct = ways.direct
    run = memory_of(able[dist.get_rank()], folder)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan, found = plan_buckets((shards[0].base,), 4096, sharded), list[bool]()
    sync = Sync("1", plan, WorldSource(), shards, SyncReport(), everyone(), everyone())
    try:
        for _ in range(2):
            found.append(ways.of(sync) is direct)
            ways.note(Committed(Coverage(1, ())), plan)
        if found[-1]:
            assert direct.told
            ways.fall_back(PeersUnreachableError("injected"))
            found.append(ways.of(sync) is direct)
    except SyncError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize(
    ("choice", "able", "sharded", "found", "error"),
    [
        ("auto", (True, True), True, [False, True, False], ""),
        ("auto", (True, False), True, [False, False], ""),
        ("auto", (True, True), False, [False, False], ""),  # the ranks are on several hosts
        ("sharded", (True, True), True, [False, False], ""),
        ("gathered", (True, True), True, [False, False], ""),
        ("direct", (True, False), True, [False], "rank 1: 'w': its memory is private"),
        ("direct", (True, True), True, [False, True], "custom.sync.delivery=direct: an engine rank cannot"),
    ],
)
def test_all_ranks_or_none(
    choice: str,
    able: tuple[bool, bool],
    sharded: bool,
    found: list[bool],
    error: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.mktemp("memory"))
    results = run_world(2, decided, choice, able, sharded, folder, timeout=60)
    assert [of_rank for of_rank, _ in results] == [found] * 2
    (text,) = {text for _, text in results}
    assert error in text and bool(error) == bool(text), text


def refused(answers: tuple[str | None, str | None], folder: str) -> tuple[list[bool], str]:
    """Whether two syncs were direct, after the engine ranks have answered (``None``: the commit failed); the error."""
    agreement, sender = Agreement(20.0), BucketSender(CPU, 20.0)
    ways, found = Choice(SyncConfig(delivery="direct"), agreement, sender, CPU), list[bool]()
    run = memory_of(True, folder)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan = plan_buckets((shards[0].base,), 4096, True)
    sync = Sync("1", plan, WorldSource(), shards, SyncReport(), everyone(), everyone())
    if (answer := answers[dist.get_rank()]) is not None:
        ways.note(Committed(Coverage(1, ()), obstacle=answer), plan)
    try:
        for _ in range(2):
            found.append(ways.of(sync) is ways.direct)
            ways.note(Committed(Coverage(1, ())), plan)
    except SyncError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize(
    ("answers", "found", "error"),
    [
        (("", "the model loads w itself"), [], "rank 1: the model loads w itself"),
        (("the model loads w itself",) * 2, [], "rank 0: the model loads w itself"),
        (("", None), [False, True], ""),
    ],
)
def test_ranks_whose_engines_answer_otherwise(
    answers: tuple[str | None, str | None],
    found: list[bool],
    error: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    results = run_world(2, refused, answers, str(tmp_path_factory.mktemp("memory")), timeout=60)
    assert [of_rank for of_rank, _ in results] == [found] * 2
    (text,) = {text for _, text in results}
    assert error in text and bool(error) == bool(text), text
