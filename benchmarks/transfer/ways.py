# SPDX-License-Identifier: Apache-2.0
"""The ways from a trainer process into a server: stock verl's, the plugin's, and a peer's."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from benchmarks.transfer import peer

# "staged" packs every sync, as where nothing lies still; "verified-always" compares what lies in the engine's own
# parameters in every sync, "unverified" in none; the others as a run does by default: in the first three
PLUGIN = ("plugin", "plugin-staged", "plugin-unverified", "plugin-verified-always")
VERIFY = {"plugin-unverified": "never", "plugin-verified-always": "always"}


def verify_of(variant: str) -> str:
    """The ``custom.sync.verify`` of a variant; empty for others than the plugin's."""
    return "" if variant not in PLUGIN else VERIFY.get(variant, "first")


def _manager(server: Any, named: list[tuple[str, Any]], bucket_mb: int, variant: str, device: str) -> Any:
    """The plugin's sharding manager over plain tensors, one owner each."""
    import torch

    from benchmarks.transfer.endpoint import ServerEndpoint
    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.layout.shard import Shard
    from verl_sync_plugin.layout.tensors import Base, View
    from verl_sync_plugin.sync.manager import ShardingManager
    from verl_sync_plugin.trainers.base import ParameterSource

    class PlainSource(ParameterSource):
        def __init__(self) -> None:
            super().__init__()
            self._shards = [self._shard(name, tensor) for name, tensor in named]

        def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
            views = (View(name, tuple(tensor.shape), 0, tensor.numel()),)
            base = Base(name, "bfloat16", 2, (tensor.numel(),), views)
            return Shard(base, partial(tensor.view, -1), run=tensor)

        def shards(self) -> list[Shard]:
            return self._shards

    class PlainManager(ShardingManager):
        def open_source(self) -> ParameterSource:
            return PlainSource()

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config = SyncConfig(verify=verify_of(variant), delivery="staged" if variant == "plugin-staged" else "auto")
    return PlainManager(None, ServerEndpoint(server), config, bucket_mb << 20, where)


class Stock:
    """verl's own transfer."""

    def __init__(self, server: Any, named: list[tuple[str, Any]], bucket_mb: int) -> None:
        from benchmarks.transfer.endpoint import StockPath

        self._path, self._named, self._bucket_mb = StockPath(server), named, bucket_mb

    def sync(self) -> dict[str, Any]:
        return {"buckets": asyncio.run(self._path.sync(self._named, self._bucket_mb))}

    def close(self) -> None:
        pass


class Plugin:
    """The plugin's transfer by a sharding manager; the report is its own profile."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._version = 0

    def sync(self) -> dict[str, Any]:
        self._version += 1
        return asyncio.run(self._both()).as_dict()

    async def _both(self) -> Any:
        await self._manager.update_weights([], self._version)
        return await self._manager.finish([])

    def give_staging_back(self) -> None:
        """At the end of every sync, as where an engine that sleeps would lack the memory."""
        self._manager.keeps_staging = False

    def close(self) -> None:
        self._manager.sender.close()


def make(variant: str, server: Any, named: list[tuple[str, Any]], bucket_mb: int, device: str) -> Any:
    """The way of ``stock``, of ``peer.NAME`` or of one of ``PLUGIN``."""
    if variant == peer.NAME:
        return peer.CheckpointEngine(server, named)
    if variant == "stock":
        return Stock(server, named, bucket_mb)
    return Plugin(_manager(server, named, bucket_mb, variant, device))
