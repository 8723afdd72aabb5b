# SPDX-License-Identifier: Apache-2.0
"""Ranks on one host and on several, staged and by broadcast: the real sharding manager over gloo, SGLang's model
classes in real receiver sessions. Hosts are names that the tests give to their processes."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import run_fresh, run_world

from contract import sglang_models as models
from contract.sources import StandIn, WorldSource, endpoint_of, even_chunks
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.sync import ways
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.sync.sender import SLOTS
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.transport.channel import connect
from verl_sync_plugin.transport.protocol import LoadRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KIND, CPU = "qwen3-moe", torch.device("cpu")


TIMEOUT = 20.0


class Beside(StandIn):
    """The rollout server of an engine whose rank next to this one is in this process: SGLang's model class in a real
    receiver session. No rank can call another process's engine here, so every rank has its own loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def load_weights(self, wire: tuple[Any, ...], version: str | None) -> float:
        request = LoadRequest.from_wire(wire)
        channel = connect(request.addresses[loader.tensor_parallel_rank()], TIMEOUT, TIMEOUT)
        try:
            loader._receive(self.model, channel, request, forget=False)
        finally:
            channel.close()
        return 0.0


def engine_of(model: torch.nn.Module, tp: int, restores: bool = False) -> RolloutEndpoint:
    first = dist.get_rank() // tp * tp
    return endpoint_of(Beside(model), True, range(first, first + tp), restores)


@dataclass(frozen=True)
class Case:
    """Ranks on hosts, and how they hold the model.

    Attributes:
        hosts: of each rank.
        joint: every tensor has one owner, as with pipeline and expert parallelism; else all ranks share out all.
        bucket_bytes: small ones make many buckets.
        failing: failures and recoveries follow.
    """

    hosts: tuple[str, ...]
    joint: bool = False
    bucket_bytes: int = 60_000
    failing: bool = False


class Source(WorldSource):
    """Shares a checkpoint out over all ranks: by rows, or tensor by tensor."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self._joint = joint
        self.weights: models.Weights = []

    def plan(self, bases: tuple[Base, ...], bucket_bytes: int, sharded: bool = False, held: int = 1) -> Plan:
        if self._joint:
            return plan_buckets(bases, bucket_bytes, sharded)
        return super().plan(bases, bucket_bytes, sharded)

    def shards(self) -> list[Shard]:
        return [self._shard(number, name, tensor) for number, (name, tensor) in enumerate(self.weights)]

    def _shard(self, number: int, name: str, tensor: torch.Tensor) -> Shard:
        world, rank, numel = dist.get_world_size(), dist.get_rank(), tensor.numel()
        if self._joint:  # the first rank has a good part of all, as the stage with the embedding
            lengths = tuple(numel if owner == (number * 3 // 2) % world else 0 for owner in range(world))
            view = View(name, tuple(tensor.shape), 0, numel, None, (Run(0, 0, numel),))
        else:
            lengths = even_chunks(tensor.shape[0], world, numel // tensor.shape[0])
            view = View(name, tuple(tensor.shape), 0, numel)
        run = tensor.reshape(-1)[sum(lengths[:rank]) :][: lengths[rank]]
        return Shard(Base(name, dtype_name(tensor.dtype), tensor.element_size(), lengths, (view,)), lambda: run)


class Manager(ShardingManager):
    def __init__(self, source: Source, *args: Any) -> None:
        super().__init__(None, *args)
        self.given = source

    def open_source(self) -> ParameterSource:
        return self.given


class Member:
    """One rank of a case."""

    def __init__(self, case: Case, config: Any, tp: int) -> None:
        self.rank, self.model, self.reference = dist.get_rank(), models.build(config), models.build(config)
        self.source = Source(case.joint)
        settings = SyncConfig(timeout_seconds=TIMEOUT)
        self.manager = Manager(self.source, engine_of(self.model, tp), settings, case.bucket_bytes, CPU)
        self.version = 0

    @property
    def plan(self) -> Plan:
        assert self.manager.planned is not None
        return self.manager.planned

    def sync(self) -> SyncReport:
        """One sync of other weights than before, into memory that holds rubbish."""
        self.version += 1
        self.source.weights = models.weights_of(KIND, self.version)
        models.poison(self.model)
        asyncio.run(self.manager.update_weights([], self.version))
        return self.manager.report

    def exact(self) -> None:
        """The engine holds what SGLang's own load of the same checkpoint gives."""
        self.reference.load_weights(iter(self.source.weights))
        models.check_same(self.model, self.reference, "the sync")

    def failing(self) -> str:
        try:
            self.sync()
        except SyncError as error:
            return str(error)
        raise AssertionError("the sync has not failed")

    def crossing(self) -> int:
        """Bytes that all ranks together have received from other hosts."""
        total = torch.tensor([self.manager.report.network_bytes])
        dist.all_reduce(total)
        return int(total.item())


def play(folder: Path, tp: int, cases: tuple[Case, ...]) -> None:
    """All cases, one after another."""
    rank, config = dist.get_rank(), models.start(folder, KIND, tp)
    for case in cases:
        with mock.patch.object(ways, "host_name", lambda case=case: case.hosts[rank]):
            story(Member(case, config, tp), case)
        dist.barrier()


def story(member: Member, case: Case) -> None:
    """Three syncs, each exact, with the bytes over the network that there have to be; then failures and recoveries."""
    several = len(set(case.hosts)) > 1
    for _ in range(3):
        report = member.sync()
        member.exact()
        assert report.buckets > 3 and report.replayed_tensors > 0, report
        assert report.delivery == ("broadcast" if several else "staged")
        assert (report.gathered_bytes > 0) == several and (report.peer_bytes > 0) == (not several), report
        alike = sum(case.hosts.count(host) for host in case.hosts)
        assert member.crossing() == report.nbytes // len(case.hosts) * (len(case.hosts) ** 2 - alike)
    if case.failing:
        if several:
            texts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(texts, a_byte_changes_on_the_network(member))
            assert len(set(texts)) == 1, texts
            member.sync()
            member.exact()
        else:
            out_of_reach(member)


def a_byte_changes_on_the_network(member: Member) -> str:
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
    assert "changed on the way to the engine" in text, text
    return text


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
        member.sync()
        member.exact()
        assert manager.report.delivery == "broadcast"


def test_four_ranks_on_one_two_and_three_hosts(tmp_path: Path) -> None:
    """Replicas of two engine ranks: on one host each, or across hosts."""
    one, two, three = ("a",) * 4, ("a", "a", "b", "b"), ("a", "b", "c", "a")
    cases = (Case(one, bucket_bytes=20_000, failing=True), Case(two, joint=True, failing=True), Case(three))
    run_fresh(4, play, tmp_path, 2, cases, timeout=280)


def test_two_ranks_on_two_hosts(tmp_path: Path) -> None:
    """One engine across them."""
    run_fresh(2, play, tmp_path, 2, (Case(("a", "b"), failing=True), Case(("a", "b"), joint=True)), timeout=280)


# Staged delivery packs, sends and loads successive buckets at once. Nothing is measured that another process could
# delay: the load of a bucket does not end before a later one is being packed, and that is not packed before the load
# has begun. A delivery that waits for either would wait in vain. Then the spans of the report must show it

BUCKETS, SHAPE = 8, (64, 64)
BUCKET_BYTES = {"staged": 13_000, "broadcast": 25_000}  # for one tensor in each
# How many buckets after the one being loaded the one being packed is; between them is the one that is being sent
APART = {"staged": 1, "broadcast": 2}
WAIT = 30.0
Spans = list[tuple[float, float]]


class Model(torch.nn.Module):
    """Of an engine; holds the tensors as they are sent."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(BUCKETS):
            self.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros(SHAPE), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)


class AtOnce:
    """Holds the load of a bucket until a later one is being packed, and the other way round."""

    def __init__(self, manager: Manager, apart: int) -> None:
        self._apart = apart
        self._loading: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._packing: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._sent: list[int] = []  # slots with a bucket that is on its way
        self.sent_meanwhile: list[bool] = []
        self._sender = manager.sender
        self._pack, self._broadcast, self._drain = self._sender.pack, self._sender.broadcast, self._sender.drain
        self._load = ModelLoad.load

    @contextmanager
    def held(self) -> Iterator[None]:
        with (
            mock.patch.multiple(self._sender, pack=self.pack, broadcast=self.broadcast, drain=self.drain),
            mock.patch.object(ModelLoad, "load", lambda *args: self.load(*args)),
        ):
            yield

    def pack(self, index: int, slot: int, shards: list[Shard]) -> None:
        self._packing[index].set()
        if index >= SLOTS:  # the first ones are packed before anything is handed over
            loaded = index - self._apart
            assert self._loading[loaded].wait(WAIT), f"bucket {index} is packed before {loaded} is being loaded"
            self.sent_meanwhile.append((index - 1) % SLOTS in self._sent)
        self._pack(index, slot, shards)

    def load(self, load: ModelLoad, index: int, slots: Sequence[torch.Tensor]) -> None:
        self._loading[index].set()
        packed = index + self._apart
        if packed < len(load.manifest.buckets):
            assert self._packing[packed].wait(WAIT), f"bucket {packed} waits until {index} has been loaded"
        self._load(load, index, slots)

    def broadcast(self, bucket: Any, slot: int, *args: Any) -> None:
        self._broadcast(bucket, slot, *args)
        self._sent.append(slot)

    def drain(self, slot: int) -> None:
        if slot in self._sent:
            self._sent.remove(slot)
        self._drain(slot)


def two_syncs(delivery: str) -> list[tuple[SyncReport, list[bool]]]:
    """One rank's reports, and whether a bucket was on its way whenever one was packed and another one loaded."""
    rank, model, source, found = dist.get_rank(), Model(), Source(joint=False), []
    host = f"host {rank}" if delivery == "broadcast" else "host"
    loader._sessions.clear()
    with (
        mock.patch.object(loader, "tensor_parallel_rank", lambda: rank),
        mock.patch.object(ways, "host_name", lambda: host),
    ):
        settings = SyncConfig(timeout_seconds=TIMEOUT, delivery="staged")
        manager = Manager(source, engine_of(model, 2), settings, BUCKET_BYTES[delivery], CPU)
        for version in range(2):
            generator = torch.Generator().manual_seed(version)
            source.weights = [(f"w{i}", torch.randn(SHAPE, generator=generator)) for i in range(BUCKETS)]
            together = AtOnce(manager, APART[delivery])
            with together.held():
                asyncio.run(manager.update_weights([], version))
            assert all(torch.equal(getattr(model, name), tensor) for name, tensor in source.weights)
            found.append((manager.report, together.sent_meanwhile))
        manager.sender.close()
        manager.meeting.close()
    loader._sessions.clear()
    return found


def spans_of(report: SyncReport, stage: str) -> Spans:
    """When every bucket was in a stage, from its begin to its end."""
    return [(start, start + seconds) for name, start, seconds in report.spans if name == stage]


def check_order(reports: list[SyncReport]) -> None:
    """No bucket is read before all ranks have packed it, and none is overwritten while any rank reads it."""
    packs, loads = ([spans_of(report, stage) for report in reports] for stage in ("pack", "engine_load"))
    for index in range(BUCKETS):
        first_read = min(of_rank[index][0] for of_rank in loads)
        assert max(of_rank[index][0] for of_rank in packs) < first_read, f"bucket {index} was read before it was packed"
        if index + SLOTS < BUCKETS:
            last_read = max(of_rank[index][1] for of_rank in loads)
            refilled = min(of_rank[index + SLOTS][1] for of_rank in packs)
            assert last_read < refilled, f"the slot of bucket {index} was filled again while it was read"


@pytest.mark.parametrize("delivery", ["staged", "broadcast"])
def test_a_bucket_is_packed_while_another_one_is_loaded(delivery: str) -> None:
    ranks = run_world(2, two_syncs, delivery)
    for found in zip(*ranks, strict=True):
        check_order([report for report, _ in found])
    for report, sent_meanwhile in (each for of_rank in ranks for each in of_rank):
        packs, loads = spans_of(report, "pack"), spans_of(report, "engine_load")
        assert report.delivery == delivery and len(packs) == len(loads) == report.buckets == BUCKETS, report
        for index in range(1, BUCKETS):
            assert packs[index][0] < loads[index - 1][1], f"bucket {index} was packed when the last one was loaded"
        for index in range(SLOTS, BUCKETS):
            pack, load = packs[index], loads[index - APART[delivery]]
            assert max(pack[0], load[0]) < min(pack[1], load[1]), f"bucket {index}: not at the same time"
        if delivery == "broadcast":
            assert sent_meanwhile == [True] * (BUCKETS - SLOTS), "no bucket was on its way between the two"
