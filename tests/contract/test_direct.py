# SPDX-License-Identifier: Apache-2.0
"""Parameters are read where they lie by all ranks or by none; decided by real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from contract.sources import WorldSource, chosen, everyone
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import PeersUnreachableError, Sync, Ways
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed

CPU = torch.device("cpu")


def memory_of(shared: bool, folder: str) -> torch.Tensor:
    if not shared:
        return torch.ones(64)
    storage = torch.UntypedStorage.from_file(f"{folder}/{dist.get_rank()}", True, 256)
    return torch.empty(0).set_(storage, 0, (64,)).fill_(1.0)


def decided(choice: str, able: tuple[bool, bool], answers: tuple[str, str], sharded: bool, folder: str) -> list[bool]:
    """True for each of two syncs in place, before and after the engine ranks have said what speaks against it; and for
    one after memory was out of reach."""
    agreement, sender, rank = Agreement(20.0), BucketSender(CPU, 20.0), dist.get_rank()
    ways = Ways(SyncConfig(delivery=choice), agreement, sender, CPU)
    run = memory_of(able[rank], folder)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan, found = plan_buckets((shards[0].base,), 4096, sharded), list[bool]()
    sync = Sync("1", plan, WorldSource(), shards, SyncReport(), everyone(), everyone())
    for _ in range(2):
        found.append(chosen(ways, agreement, sync).in_place)
        ways.in_place.note(Committed(obstacle=answers[rank]), plan)
    if found[-1]:
        assert ways.in_place.known
        ways.fall_back(PeersUnreachableError("injected"))
        found.append(chosen(ways, agreement, sync).in_place)
    return found


@pytest.mark.parametrize(
    ("choice", "able", "answers", "sharded", "found"),
    [
        ("auto", (True, True), ("", ""), True, [False, True, False]),
        ("auto", (True, False), ("", ""), True, [False, False]),
        ("auto", (True, True), ("", "the model loads w itself"), True, [False, False]),
        ("auto", (True, True), ("", ""), False, [False, False]),  # the ranks are on several hosts
        ("staged", (True, True), ("", ""), True, [False, False]),
    ],
)
def test_all_ranks_or_none(
    choice: str,
    able: tuple[bool, bool],
    answers: tuple[str, str],
    sharded: bool,
    found: list[bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.mktemp("memory"))
    assert run_world(2, decided, choice, able, answers, sharded, folder, timeout=60) == [found] * 2
