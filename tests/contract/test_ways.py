# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks or none read parameters where they lie; which bytes cross hosts: ``test_several_hosts``."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract.sources import WorldSource, everyone
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.sync.ways import Sync, WayRefusedError, Ways
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed


def memory_of(shared: bool, folder: Path) -> torch.Tensor:
    if not shared:
        return torch.ones(64)
    storage = torch.UntypedStorage.from_file(f"{folder}/{dist.get_rank()}", True, 256)
    return torch.empty(0).set_(storage, 0, (64,)).fill_(1.0)


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
@on_ranks(2, timeout=60)
def test_all_ranks_or_none(
    choice: str, able: tuple[bool, bool], answers: tuple[str, str], sharded: bool, found: list[bool], tmp_path: Path
) -> None:
    """``found`` is True for each of two syncs in place, before and after the engine ranks have said what speaks against
    it; and for one after memory was out of reach."""
    agreement, rank = Agreement(20.0), dist.get_rank()
    ways = Ways(SyncConfig(delivery=choice), agreement, BucketSender(torch.device("cpu"), 20.0))
    run = memory_of(able[rank], tmp_path)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan, seen = plan_buckets((shards[0].base,), 4096, sharded), list[bool]()
    sync = Sync(plan, WorldSource(), shards, SyncReport(), everyone())

    def chosen() -> bool:
        return ways.take(sync, agreement.vote("choosing the way", ways.votes(sync)).tolist()) is ways.direct

    with redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            seen.append(chosen())
            ways.direct.note(Committed(obstacle=answers[rank]), plan)
        if seen[-1]:
            assert ways.direct.known
            ways.fall_back(WayRefusedError("injected"))
            seen.append(chosen())
    by_choice = "(not direct: actor_rollout_ref.rollout.custom.sync.delivery=staged)"
    assert (by_choice in said.getvalue()) == (choice == "staged" and rank == 0)
    assert seen == found
