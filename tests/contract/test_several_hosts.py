# SPDX-License-Identifier: Apache-2.0
"""Ranks on one host and on several, staged and by broadcast: the real sharding manager over gloo, SGLang's model
classes in real receiver sessions. Hosts are names that the tests give to their processes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import on_ranks

from contract import sglang_models as models
from contract.sources import WorldSource, same_everywhere
from contract.wire import Wire
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync import ways
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.trainers.base import dtype_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_processes"), pytest.mark.timeout(300)]

KIND = "qwen3-moe"


@dataclass(frozen=True)
class Case:
    """Ranks on hosts, and how they hold the model."""

    hosts: str  # a letter for each rank
    joint: bool = False  # every tensor has one owner, as with pipeline parallelism; else ranks share out all
    replicas: int = 1  # with hybrid sharding each group of neighbours holds the whole model
    bucket_bytes: int = 60_000
    failing: bool = False  # failures and recoveries follow

    @property
    def groups(self) -> list[list[int]]:
        size = len(self.hosts) // self.replicas
        return [[*range(first, first + size)] for first in range(0, len(self.hosts), size)]


class Owned(WorldSource):
    """Every tensor has one owner, as with pipeline parallelism; the first rank has a good part of all."""

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
        return plan_buckets(bases, bucket_bytes, sharded)

    def shards(self) -> list[Shard]:
        return [self._shard(number, name, tensor) for number, (name, tensor) in enumerate(self.weights)]

    def _shard(self, number: int, name: str, tensor: torch.Tensor) -> Shard:
        world, numel = dist.get_world_size(), tensor.numel()
        lengths = tuple(numel if owner == (number * 3 // 2) % world else 0 for owner in range(world))
        view = View(name, tuple(tensor.shape), 0, numel, None, (Run(0, 0, numel),))
        run = tensor.reshape(-1)[: lengths[dist.get_rank()]]
        return Shard(Base(name, dtype_name(tensor.dtype), tensor.element_size(), lengths, (view,)), lambda: run)


class Member(Wire):
    """One rank of a case."""

    def __init__(self, case: Case, config: Any, tp: int) -> None:
        groups = {rank: group for ranks in case.groups for group in (dist.new_group(ranks),) for rank in ranks}
        self.rank, self.reference, self.version = dist.get_rank(), models.build(config), 0
        source = Owned() if case.joint else WorldSource(groups[self.rank])
        super().__init__(models.build(config), source, case.bucket_bytes, tp)

    def next(self) -> SyncReport:
        """One sync of other weights than before."""
        self.version += 1
        return self.sync(models.weights_of(KIND, self.version))

    def exact(self) -> None:
        """The engine holds what SGLang's own load of the same checkpoint gives."""
        self.reference.load_weights(iter(self.source.weights))
        models.check_same(self.model, self.reference, "the sync")

    def failing(self) -> str:
        try:
            self.next()
        except SyncError as error:
            return str(error)
        raise AssertionError("the sync has not failed")

    def crossing(self) -> int:
        """Bytes that all ranks together have received from other hosts."""
        total = torch.tensor([self.manager.report.network_bytes])
        dist.all_reduce(total)
        return int(total.item())


def story(member: Member, case: Case) -> None:
    """Three syncs, each exact, with the bytes over the network that there have to be; then failures and recoveries. The
    log says once how bytes travel."""
    world = len(case.hosts)
    apart = sum(case.hosts[one] != case.hosts[other] for ranks in case.groups for one in ranks for other in ranks)
    several, said = apart > 0, io.StringIO()
    for _ in range(3):
        with noting(member) as events, redirect_stdout(said):
            report = member.next()
        member.exact()
        assert report.buckets > SLOTS and report.replayed_tensors > 0, report
        assert report.delivery == ("broadcast" if several else "staged")
        assert (report.gathered_bytes > 0) == several and (report.peer_bytes > 0) == (world > 1 and not several), report
        assert member.crossing() == report.nbytes // len(case.groups[0]) * apart
        check_order(events, report, world)
    why = "not staged alone: ranks that share out the model are on several hosts"
    assert said.getvalue().count("delivery is") == (member.rank == 0), said.getvalue()
    assert said.getvalue().count(why) == (several and member.rank == 0), said.getvalue()
    if case.failing:
        (a_byte_changes_on_the_network if several else out_of_reach)(member)


# Delivery packs, sends and loads successive buckets at once: what a rank does with each of them, in its order

Events = list[tuple[str, int]]


@contextmanager
def noting(member: Member) -> Iterator[Events]:
    manager, events = member.manager, Events()

    def noted(owner: Any, name: str, number: Callable[..., int] = lambda index, *_: index) -> Any:
        honest = getattr(owner, name)

        def note(*args: Any, **more: Any) -> Any:
            events.append((name, number(*args)))
            return honest(*args, **more)

        return mock.patch.object(owner, name, note)

    with ExitStack() as stack:
        for name in ("pack", "load", "wait_loaded", "drain"):
            stack.enter_context(noted(manager.sender, name))
        stack.enter_context(noted(manager.sender, "broadcast", lambda bucket, *_: member.plan.buckets.index(bucket)))
        packing = re.compile(r"packing bucket (\d+)")
        settled = lambda what, *_: int(found[1]) - 1 if (found := packing.match(what)) else -1  # noqa: E731
        stack.enter_context(noted(manager.agreement, "settle", settled))
        yield events


def check_order(events: Events, report: SyncReport, world: int) -> None:
    """Of every bucket, and that one is packed while an earlier one is loaded. Between them is the one that is being
    sent, or that waits in its slot."""
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


def a_byte_changes_on_the_network(member: Member) -> None:
    """A bit flips in each byte of a segment that rank 0 has received, of which its engine rank may read a part only;
    whoever reads it says so."""
    sender = member.manager.sender
    honest, drained = sender.broadcast, sender.drain
    received: list[int] = []

    def noting(bucket: Any, slot: int, *args: Any) -> None:
        honest(bucket, slot, *args)
        if member.rank == 0 and bucket is member.plan.buckets[1]:
            received.append(slot)

    def flipping(slot: int) -> None:
        drained(slot)
        if slot in received:
            received.clear()
            stride = member.plan.buckets[1].stride
            sender._slot(slot).narrow(0, stride, stride).bitwise_xor_(128)

    sender.broadcast, sender.drain = noting, flipping  # type: ignore[method-assign]
    text = member.failing()
    sender.broadcast, sender.drain = honest, drained  # type: ignore[method-assign]
    assert "changed on the way to the engine" in same_everywhere(text), text
    member.next()
    member.exact()


def out_of_reach(member: Member) -> None:
    """Engine ranks cannot open their neighbours' memory: the same sync goes on by broadcast."""
    manager = member.manager
    sender, honest = manager.sender, manager.sender.export

    def elsewhere(reader: int) -> Any:
        found = honest(reader)
        return found if reader == member.rank else replace(found, key=f"gone {reader}", handle=("/nowhere",))

    sender.close()
    sender.export = elsewhere  # type: ignore[method-assign, assignment]
    for _ in range(2):
        member.next()
        member.exact()
        assert manager.report.delivery == "broadcast"


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (
            4,
            [
                Case("aaaa", bucket_bytes=20_000, failing=True),  # replicas of two engine ranks, on one host each
                Case("aabb", joint=True, failing=True),
                Case("abca"),  # and across hosts
                Case("aabb", replicas=2),
                Case("aaab", replicas=2),  # one group alone decides for all
            ],
        ),
        (2, [Case("ab", failing=True), Case("ab", joint=True)]),  # one engine across two hosts
        (1, [Case("a")]),
    ],
    ids=["four", "two", "one"],
)
@on_ranks("world", timeout=280)
def test_ranks_on_any_hosts(world: int, cases: list[Case], tmp_path: Path) -> None:
    tp = min(world, 2)
    config = models.start(tmp_path, KIND, tp)
    for case in cases:
        with mock.patch.object(ways, "host_name", lambda case=case: case.hosts[dist.get_rank()]):
            story(Member(case, config, tp), case)
        dist.barrier()
