# SPDX-License-Identifier: Apache-2.0
"""What the ranks of ``test_several_hosts.py`` do: the real sharding manager over gloo, and SGLang's model classes in
real receiver sessions. Hosts are names that the test gives to its processes; module-level, for spawned processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from contract import sglang_models as models
from contract.engine_beside import TIMEOUT, Engine
from contract.sources import WorldSource
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.strided import Run
from verl_sync_plugin.layout.tensors import Base, Plan, Shard, View
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync import ways
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.trainers.fsdp2 import even_chunks

KIND, CPU = "qwen3-moe", torch.device("cpu")


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
        self.manager = Manager(self.source, Engine(self.model, tp), settings, case.bucket_bytes, CPU)
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
        ours, theirs = models.held(self.model), models.held(self.reference)
        assert ours.keys() == theirs.keys()
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different, different[:8]

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


def play(rank: int, folder: str, port: int, tp: int, cases: tuple[Case, ...]) -> None:
    """Entry of a spawned process: all cases, one after another."""
    torch.set_num_threads(1)
    world = len(cases[0].hosts)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    config = models.start(Path(folder), KIND, rank, world, port, tp)
    for case in cases:
        with mock.patch.object(ways, "host_name", lambda case=case: case.hosts[rank]):
            member = Member(case, config, tp)
            story(member, case)
        dist.barrier()
    dist.destroy_process_group()


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
