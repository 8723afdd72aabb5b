# SPDX-License-Identifier: Apache-2.0
"""Which way segments go, decided by real process groups."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from contract.sources import WorldSource
from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.delivery import reach
from verl_sync_plugin.sync.delivery.base import Sync
from verl_sync_plugin.sync.delivery.choice import Choice
from verl_sync_plugin.sync.delivery.exchanged import Exchanged
from verl_sync_plugin.sync.planning import Planning
from verl_sync_plugin.sync.sender import BucketSender
from verl_sync_plugin.transport.agreement import Agreement


def decided(choice: str, hosts: tuple[str, ...], group_size: int) -> tuple[str, str]:
    """How this rank delivers staged bytes, with the segments in a slot; and the error."""
    rank, groups = dist.get_rank(), []
    for first in range(0, dist.get_world_size(), group_size):
        groups.append(dist.new_group(list(range(first, first + group_size)), backend="gloo"))
    agreement = Agreement(20)
    made = reach.Reach(SyncConfig(delivery=choice), agreement)
    with mock.patch.object(reach, "host_name", lambda: hosts[rank]):
        try:
            made.decide(groups[rank // group_size])
        except SyncError as error:
            return "", str(error)
    assert made.possible is not None
    way = ("exchanged" if made.several else "sharded") if made.possible else "gathered"
    return f"{way} {made.held}" if made.possible else way, ""


@pytest.mark.parametrize(
    ("choice", "hosts", "group_size", "expected"),
    [
        ("auto", ("a",) * 4, 4, "sharded 1"),
        ("auto", ("a",) * 4, 2, "sharded 1"),
        ("auto", ("a", "a", "b", "b"), 2, "sharded 1"),  # hybrid sharding: every group on its host
        ("auto", ("a", "a", "b", "b"), 4, "exchanged 2"),
        ("auto", ("a", "b", "b", "a"), 4, "exchanged 2"),
        ("auto", ("a", "b", "c", "d"), 4, "exchanged 4"),
        ("auto", ("a", "a", "a", "b"), 4, "exchanged 4"),  # the rank that is alone holds everything
        ("auto", ("a", "a", "a", "b"), 2, "exchanged 2"),  # one group alone decides for all
        ("auto", ("a",) * 4, 1, "gathered"),  # nothing to share out
        ("exchanged", ("a", "a", "b", "b"), 4, "exchanged 2"),
        ("gathered", ("a", "a", "b", "b"), 4, "gathered"),
        ("gathered", ("a",) * 4, 4, "gathered"),
        ("sharded", ("a",) * 4, 4, "sharded 1"),
    ],
)
def test_the_hosts_of_a_group_decide(choice: str, hosts: tuple[str, ...], group_size: int, expected: str) -> None:
    assert run_world(4, decided, choice, hosts, group_size, timeout=60) == [(expected, "")] * 4


def test_several_hosts_refuse_sharded() -> None:
    results = run_world(4, decided, "sharded", ("a", "a", "b", "b"), 4, timeout=60)
    texts = {text for _, text in results}
    assert len(texts) == 1
    assert "custom.sync.delivery=sharded: trainer ranks (0, 1, 2, 3)" in texts.pop()


def test_one_host_refuses_exchanged() -> None:
    (text,) = {text for _, text in run_world(4, decided, "exchanged", ("a",) * 4, 2, timeout=60)}
    assert "custom.sync.delivery=exchanged: trainer ranks (0, 1)" in text and "on one host (a)" in text


@pytest.mark.parametrize("instead", ["gathered", "broadcast"])
def test_an_exchange_that_cannot_begin_names_the_key_and_what_to_set(instead: str) -> None:
    """Ranks that a network keeps apart are found out in the first transfer between them."""

    def exchange(*_: Any) -> None:
        raise RuntimeError("NCCL did not connect this rank with the others within 20 s")

    way = Exchanged.__new__(Exchanged)
    way._sender = SimpleNamespace(exchange=exchange)  # type: ignore[assignment]
    sync: Any = SimpleNamespace(plan=SimpleNamespace(buckets=[SimpleNamespace(world=2)]))
    made = mock.patch.multiple(
        Exchanged, _apart=instead == "broadcast", _parcels_of=lambda *_: [([], [])], _link_of=lambda *_: None
    )
    with made, pytest.raises(RuntimeError, match=f"within 20 s. .*{KEY_PREFIX}.delivery={instead}"):
        way._send(sync, 0)


def said_of_the_choice(choice: str) -> str:
    """What rank 0 says in the log when delivery is chosen for the first time."""
    agreement, sender = Agreement(20), BucketSender(torch.device("cpu"), 20)
    ways = Choice(SyncConfig(delivery=choice), agreement, sender, torch.device("cpu"))
    shards = [Shard(Base("w", "uint8", 1, (64, 64), (View("w", (128,), 0, 128),)), lambda: torch.zeros(64))]
    source = WorldSource(shards)
    plan, found = Planning(agreement).agree(source, 4096, ways.reach)
    with redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            ways.of(Sync("1", plan, source, found, SyncReport(), (0, 1), (0, 1)))
    return said.getvalue()


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ("auto", "delivery is sharded (not direct: the engine has not yet said that it can)"),
        ("gathered", "delivery=gathered)"),
    ],
)
def test_the_log_says_once_how_bytes_travel_and_why(choice: str, line: str) -> None:
    first, second = run_world(2, said_of_the_choice, choice, timeout=60)
    assert line in first and first.count("\n") == 1 and not second, (first, second)
