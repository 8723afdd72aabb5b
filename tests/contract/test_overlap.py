# SPDX-License-Identifier: Apache-2.0
"""Staged delivery packs, sends and loads successive buckets at once, on real ranks, channels and engine sessions.

Nothing is measured that another process on the machine could delay: the load of a bucket does not end before a later
bucket is being packed, and that is not packed before the load has begun. A delivery that waits for either would wait in
vain. Then the spans of the report must show it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from contract.engine_beside import TIMEOUT, Engine
from contract.several_hosts import Manager, Source
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.engine.load import ModelLoad
from verl_sync_plugin.layout.tensors import Shard
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts.sglang import loader
from verl_sync_plugin.sync import ways
from verl_sync_plugin.sync.sender import SLOTS

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
        manager = Manager(source, Engine(model, 2), settings, BUCKET_BYTES[delivery], torch.device("cpu"))
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


@pytest.mark.slow
@pytest.mark.parametrize("delivery", ["staged", "broadcast"])
def test_a_bucket_is_packed_while_another_one_is_loaded(delivery: str) -> None:
    for report, sent_meanwhile in (each for of_rank in run_world(2, two_syncs, delivery) for each in of_rank):
        packs, loads = spans_of(report, "pack"), spans_of(report, "engine_load")
        assert report.delivery == delivery and len(packs) == len(loads) == report.buckets == BUCKETS, report
        for index in range(1, BUCKETS):
            assert packs[index][0] < loads[index - 1][1], f"bucket {index} was packed when the last one was loaded"
        for index in range(SLOTS, BUCKETS):
            pack, load = packs[index], loads[index - APART[delivery]]
            assert max(pack[0], load[0]) < min(pack[1], load[1]), f"bucket {index}: not at the same time"
        if delivery == "broadcast":
            assert sent_meanwhile == [True] * (BUCKETS - SLOTS), "no bucket was on its way between the two"
