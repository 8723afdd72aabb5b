# SPDX-License-Identifier: Apache-2.0
"""Opens the sources and managers of trainers, and gives them servers without an engine."""

import pickle
import re
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from contract.reading import CPU
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.sharding_manager import get_sharding_manager
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.sync.manager import ShardingManager
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.verify import Comparison

BUCKET_BYTES = 64 << 10  # of a manager


class WorldSource(ParameterSource):
    """Shares tensors out over the ranks of a group, or all; one that comes twice is tied."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group or dist.group.WORLD
        self.weights: Sequence[tuple[str, torch.Tensor]] = ()

    def shards(self) -> list[Shard]:
        world = dist.get_world_size(self.group)
        tied: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in self.weights:
            tied.setdefault(id(tensor), ([], tensor))[0].append(name)
        return [shard_of(tuple(names), tensor, self.rank, world) for names, tensor in tied.values()]


class SourceManager(ShardingManager):
    """Syncs a source that it is given in place of verl's engine."""

    def __init__(self, given: ParameterSource, *args: Any) -> None:
        super().__init__(None, *args)
        self.given = given

    def open_source(self) -> ParameterSource:
        return self.given


def open_source(
    strategy: str, engine: Any, *kept: str, wire: str = "bfloat16", seconds: float = 30.0, backend: Any = None
) -> Any:
    """The source of an engine; the rollout keeps what has a name of these patterns as the trainer has it."""
    backend = backend or get_sharding_manager(strategy, "sglang").backend  # type: ignore[attr-defined]
    trainer = backend(engine, SyncConfig(timeout_seconds=seconds), CPU, wire)
    trainer.policy.kept = Wanted(*kept)
    return trainer.open_source()


def manager_of(strategy: str, engine: Any, server: Any, leads: bool = True, wire: str = "bfloat16", **keys: Any) -> Any:
    """The manager of an engine; a leading rank calls the server."""
    config, endpoint = SyncConfig(timeout_seconds=20.0, **keys), endpoint_of(server, leads)
    return get_sharding_manager(strategy, "sglang")(engine, endpoint, config, BUCKET_BYTES, CPU, wire)


def shard_of(names: tuple[str, ...], tensor: torch.Tensor, rank: int, world: int, owner: int | None = None) -> Shard:
    """A rank's rows of a tensor, cut as by ``torch.chunk``, or all of it for the ``owner``; several names are tied."""
    numel, rows = tensor.numel(), [len(chunk) for chunk in torch.arange(tensor.shape[0]).chunk(world)]
    lengths = tuple(each * numel // tensor.shape[0] for each in (*rows, *[0] * (world - len(rows))))
    if owner is not None:
        lengths = tuple(numel if each == owner else 0 for each in range(world))
    views = tuple(View(name, tuple(tensor.shape), 0, numel) for name in names)
    run = tensor.reshape(-1)[sum(lengths[:rank]) :][: lengths[rank]]
    return Shard(Base(names[0], dtype_name(tensor.dtype), tensor.element_size(), lengths, views), lambda: run, run=run)


def in_a_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """A copy in memory that other processes can map as they can all device memory."""
    storage = torch.UntypedStorage.from_file(f"{folder}/{uuid.uuid4().hex}.memory", True, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape).copy_(tensor)  # type: ignore[call-overload]


def everyone() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def same_everywhere(text: str) -> str:
    """A text that all ranks have."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


def raised_alike(kind: Any, call: Callable[..., object], *given: Any, **more: Any) -> str:
    """Returns the text of an error that all ranks have to raise alike."""
    with pytest.raises(kind) as caught:
        call(*given, **more)
    return same_everywhere(str(caught.value))


def reads_unseen() -> Any:
    """A patch for syncs that do not compare what an engine rank has read: the comparison of what it holds is left."""
    honest = Comparison._unequal

    def unequal(comparison: Any, sent: Any, found: Any, times: Any) -> list[str]:
        return [] if times is comparison._read.times else honest(comparison, sent, found, times)

    return mock.patch.object(Comparison, "_unequal", unequal)


class Wanted(dict[str, str]):
    """Acts as ``WirePolicy.kept`` of an engine that takes tensors of these patterns as the trainer has them."""

    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self._patterns = patterns

    def __contains__(self, name: object) -> bool:
        return any(re.search(pattern, str(name)) for pattern in self._patterns)

    def __missing__(self, name: str) -> str:
        return ""


class StandIn:
    """A rollout server without an engine: unpacks adapters as SGLang does, and refuses them if asked to."""

    def __init__(self) -> None:
        self.adapters: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        self.refuses = False

    def load_adapter(self, settings: dict[str, Any], packed: bytes, sent: Any, version: str | None) -> float:
        if self.refuses:
            raise RuntimeError("SGLang refused the adapter: rank too high")
        self.adapters.append((settings, pickle.loads(packed)))
        return 0.5

    def __getattr__(self, method: str) -> Any:
        return lambda *args: None


def endpoint_of(
    server: Any, leader: bool = True, ranks: Sequence[int] | None = None, restores: bool = False
) -> RolloutEndpoint:
    """The product's own; the server's methods run in threads. If no ranks are named, all belong to the engine."""
    pool = ThreadPoolExecutor()

    def call(method: str, *args: Any) -> Future[Any]:
        return pool.submit(getattr(server, method), *args)

    return RolloutEndpoint(rollout_of("sglang"), call if leader else None, tuple(ranks or everyone()), restores, 20.0)
