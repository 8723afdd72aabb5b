# SPDX-License-Identifier: Apache-2.0
"""Checks which way bytes go, and that all ranks or none read parameters where they lie; real groups decide."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract.sources import WorldSource, everyone, shard_of
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync import ways
from verl_sync_plugin.sync.sender import BucketSender, slot_limit
from verl_sync_plugin.sync.ways import Sync, Way, WayRefusedError, Ways, ranks_of
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.protocol import Committed

CPU = torch.device("cpu")


NOT_YET = "delivery is staged (not direct: the engine has not yet said that it can)"
SPREAD = "not staged alone: ranks that share out the model are on several hosts)"


@pytest.mark.parametrize(
    ("delivery", "hosts", "group_size", "reads", "line"),
    [
        ("auto", "aaaa", 4, True, NOT_YET),
        ("staged", "aaaa", 4, True, "(not direct: actor_rollout_ref.rollout.custom.sync.delivery=staged)"),
        ("auto", "aaaa", 2, True, NOT_YET),
        ("auto", "aabb", 2, True, NOT_YET),  # hybrid sharding: every group on its host
        ("auto", "aabb", 4, False, SPREAD),
        ("auto", "abcd", 4, False, SPREAD),
        ("auto", "aaab", 2, False, SPREAD),  # one group alone decides for all
        ("auto", "aaaa", 1, False, NOT_YET),  # nothing to share out
    ],
)
@on_ranks(4, timeout=60)
def test_the_hosts_of_a_group_decide_and_the_log_says_once_how_bytes_travel_and_why(
    delivery: str, hosts: str, group_size: int, reads: bool, line: str
) -> None:
    """True in the table where engine ranks read segments from several ranks."""
    agreement, sender, rank = Agreement(20), BucketSender(CPU, 20), dist.get_rank()
    both, source = Ways(SyncConfig(delivery=delivery), agreement, sender), WorldSource()
    for first in range(0, dist.get_world_size(), group_size):
        group = dist.new_group(list(range(first, first + group_size)), backend="gloo")
        source.group = group if rank // group_size * group_size == first else source.group
    with mock.patch.object(ways, "host_name", lambda: hosts[rank]):
        both.reach.decide(agreement, ranks_of(source.group, rank), "ranks that share out the model")
    shards = [shard_of(("w",), torch.zeros(128), rank % group_size, group_size)]
    assert both.reach.sharded is reads
    plan = source.plan((shards[0].base,), slot_limit(4096), reads)
    with redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            chosen(both, agreement, Sync(plan, source, shards, SyncReport(), ranks_of(source.group, rank)))
    text = said.getvalue()
    assert line in text and text.count("\n") == 1 if rank == 0 else not text, text


def chosen(both: Ways, agreement: Agreement, sync: Sync) -> Way:
    """The way that the ranks vote for."""
    return both.take(sync, agreement.vote("choosing the way", both.votes(sync)).tolist())


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
    agreement, sender, rank = Agreement(20.0), BucketSender(CPU, 20.0), dist.get_rank()
    way = Ways(SyncConfig(delivery=choice), agreement, sender)
    run = memory_of(able[rank], tmp_path)
    shards = [Shard(Base("w", "bfloat16", 2, (64, 64), (View("w", (128,), 0, 128),)), lambda: run, run=run)]
    plan, seen = plan_buckets((shards[0].base,), 4096, sharded), list[bool]()
    sync = Sync(plan, WorldSource(), shards, SyncReport(), everyone())
    for _ in range(2):
        seen.append(chosen(way, agreement, sync) is way.direct)
        way.direct.note(Committed(obstacle=answers[rank]), plan)
    if seen[-1]:
        assert way.direct.known
        way.fall_back(WayRefusedError("injected"))
        seen.append(chosen(way, agreement, sync) is way.direct)
    assert seen == found
