# SPDX-License-Identifier: Apache-2.0
"""Covers ranks on one host and on several, staged and by broadcast; hosts are names that the tests give."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from worlds import on_ranks

from contract import sglang_models as models
from contract.sources import WorldSource, shard_of
from contract.wire import Wire
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync import delivery
from verl_sync_plugin.sync.sender import SLOTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_processes"), pytest.mark.timeout(300)]

KIND = "qwen3-moe"


@dataclass(frozen=True)
class Case:
    """Ranks on hosts, and how they hold the model."""

    hosts: str  # a letter for each rank
    joint: bool = False  # every tensor has one owner, as with pipeline parallelism; else ranks share out all
    replicas: int = 1  # with hybrid sharding each group of neighbours holds the whole model
    bucket_bytes: int = 60_000

    @property
    def groups(self) -> list[list[int]]:
        size = len(self.hosts) // self.replicas
        return [[*range(first, first + size)] for first in range(0, len(self.hosts), size)]


class Owned(WorldSource):
    """Every tensor has one owner, as with pipeline parallelism; the first rank has a good part of all."""

    def shards(self) -> list[Shard]:
        world = dist.get_world_size()
        return [
            shard_of((name,), tensor, self.rank, world, owner=number * 3 // 2 % world)
            for number, (name, tensor) in enumerate(self.weights)
        ]


def story(case: Case, config: Any, tp: int) -> None:
    """Plays three exact syncs; the log says how they travel."""
    rank, world = dist.get_rank(), len(case.hosts)
    groups = {each: group for ranks in case.groups for group in (dist.new_group(ranks),) for each in ranks}
    source = Owned() if case.joint else WorldSource(groups[rank])
    wire, reference = Wire(models.build(config), source, case.bucket_bytes, tp), models.build(config)
    several, said = any(len({case.hosts[each] for each in ranks}) > 1 for ranks in case.groups), io.StringIO()
    for version in (1, 2, 3):
        with noting(wire) as events, redirect_stdout(said):
            report = wire.exact(reference, models.weights_of(KIND, version))
        assert report.buckets > SLOTS and report.replayed_tensors > 0, report
        assert report.delivery == ("broadcast" if several else "staged")
        check_order(events, report, world)
    why = "slots cannot be read where they were packed: ranks that share out the model are on several hosts"
    assert said.getvalue().count("delivery is") == (rank == 0), said.getvalue()
    assert said.getvalue().count(why) == (several and rank == 0), said.getvalue()


Events = list[tuple[str, int]]


@contextmanager
def noting(wire: Wire) -> Iterator[Events]:
    manager, events = wire.manager, Events()

    def noted(owner: Any, name: str, number: Callable[..., int] = lambda index, *_: index) -> Any:
        honest = getattr(owner, name)

        def note(*args: Any, **more: Any) -> Any:
            events.append((name, number(*args)))
            return honest(*args, **more)

        return mock.patch.object(owner, name, note)

    with ExitStack() as stack:
        for name in ("pack", "load", "wait_loaded", "drain"):
            stack.enter_context(noted(manager.sender, name))
        stack.enter_context(noted(manager.sender, "broadcast", lambda bucket, *_: wire.plan.buckets.index(bucket)))
        packing = re.compile(r"packing bucket (\d+)")
        settled = lambda what, *_: int(found[1]) - 1 if (found := packing.match(what)) else -1  # noqa: E731
        stack.enter_context(noted(manager.agreement, "settle", settled))
        yield events


def check_order(events: Events, report: SyncReport, world: int) -> None:
    """Checks that a bucket is packed while an earlier one is loaded, and that the one between them is sent or waits."""
    at = {event: place for place, event in enumerate(events)}
    sends, count = report.delivery == "broadcast", report.buckets
    ahead = 2 if sends or world == 1 else 1
    for index in range(count):
        packed, read = at["pack", index], at["wait_loaded", index]
        assert packed < at["settle", index] < at["load", index] < read, "read before it was packed everywhere"
        if (later := index + SLOTS) < count:
            assert read < at["pack", later], "overwritten before it was read"
            if world == 1:  # nobody else reads the slot, so it is filled before the next bucket is loaded
                assert at["pack", later] < at["load", index + 2]
            else:
                assert read < at["settle", index + 2] < at["pack", later], "another rank may still read it"
        if SLOTS <= index + ahead < count:
            assert at["load", index] < at["pack", index + ahead] < read, "not at the same time"
            sent = at["broadcast", index + 1] if sends else 0
            assert sent < at["load", index]
            drained = ("drain", (index + 1) % SLOTS)
            assert not sends or events.index(drained, sent) > at["pack", index + ahead], "not on its way"


CASES = [
    Case("aaaa", bucket_bytes=20_000),  # replicas of two engine ranks, on one host each
    Case("aabb", joint=True),
    Case("abca"),  # and across hosts
    Case("aabb", replicas=2),
    Case("aaab", replicas=2),  # one group alone decides for all
    *(Case("ab"), Case("ab", joint=True)),  # one engine across two hosts
    Case("a"),
]


@pytest.mark.parametrize("world", [4, 2, 1])
@on_ranks("world", timeout=280)
def test_ranks_on_any_hosts(world: int, tmp_path: Path) -> None:
    tp = min(world, 2)
    config = models.start(tmp_path, KIND, tp)
    for case in (each for each in CASES if len(each.hosts) == world):
        with mock.patch.object(delivery, "host_name", lambda case=case: case.hosts[dist.get_rank()]):
            story(case, config, tp)
        dist.barrier()
