# SPDX-License-Identifier: Apache-2.0
"""How the plugin and verl's own way bring weights to the server."""

from __future__ import annotations

import asyncio
import base64
import threading
from concurrent.futures import Future
from typing import Any

from benchmarks.transfer.server import Client
from verl_sync_plugin.rollouts.sglang.lora import served_settings
from verl_sync_plugin.rollouts.sglang.request import LOADER, dumps, pack_request
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest

ADAPTER = "trained"


class ServerEndpoint(RolloutEndpoint):
    """The server as the plugin's sharding manager sees it: one POST per sync.

    Args:
        server: of one engine rank.
        ranks: see ``RolloutEndpoint``.
    """

    def __init__(self, server: Client, ranks: tuple[int, ...] = (0,)) -> None:
        self._server = server
        self._ranks = ranks
        self._flushing: Future[None] | None = None

    leader = True  # type: ignore[assignment]
    restores_uncovered = False  # type: ignore[assignment]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    async def resume(self, tags: list[str]) -> None:
        raise AssertionError("the benchmark's server never sleeps")

    async def finish(self, tags: list[str]) -> None:
        flushing, self._flushing = self._flushing or _asked(self._server, "GET", "/flush_cache"), None
        await asyncio.wrap_future(flushing)

    def flush_behind_load(self) -> None:
        self._flushing = _asked(self._server, "GET", "/flush_cache")

    async def abandon(self, why: str) -> None:
        print(f"sync failed: {why}", flush=True)

    async def publish(self, report: dict[str, Any]) -> None:
        pass

    async def load_adapter(self, config: Any, factors: Any, weight_version: str | None) -> LoadOutcome:
        server, body = self._server, {"lora_name": ADAPTER}
        if server.adapter:
            await asyncio.to_thread(server.ask, "POST", "/unload_lora_adapter", body)
        packed = base64.b64encode(dumps(factors)).decode()
        body = {**body, "config_dict": served_settings(config), "serialized_tensors": packed}
        await asyncio.to_thread(server.ask, "POST", "/load_lora_adapter_from_tensors", body)
        server.adapter = ADAPTER
        return LoadOutcome(nbytes=len(packed))

    def start_load(self, request: LoadRequest, weight_version: str | None) -> PendingLoad:
        return _Post(self._server, request)


def _asked(server: Client, *question: Any) -> Future[None]:
    """Asks in a thread."""
    future: Future[None] = Future()

    def ask() -> None:
        try:
            server.ask(*question)
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return future


class _Post(PendingLoad):
    def __init__(self, server: Client, request: LoadRequest) -> None:
        blob = base64.b64encode(pack_request(request.to_wire())).decode()
        body = {"serialized_named_tensors": [blob], "load_format": LOADER, "flush_cache": False}
        self._future = _asked(server, "POST", "/update_weights_from_tensor", body)

    def finished(self) -> bool:
        return self._future.done()

    async def outcome(self, timeout: float) -> LoadOutcome:
        await asyncio.wait_for(asyncio.wrap_future(self._future), timeout)
        return LoadOutcome()


class StockPath:
    """verl 0.9.1's own way for a colocated rollout: bucket, serialize, POST; then one flush."""

    def __init__(self, server: Client) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

        self._mesh = init_device_mesh("cpu", mesh_shape=(1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        where = {"host": "127.0.0.1", "port": server.port}
        self._engine = AsyncHttpServerAdapter(
            model_path=str(server.model), launch_server=False, skip_tokenizer_init=True, **where
        )

    async def sync(self, named: list[tuple[str, Any]], bucket_mb: int) -> int:
        """One sync; returns the number of buckets."""
        # verl gathers every parameter into a new tensor
        return await self.load(((name, tensor.clone()) for name, tensor in named), bucket_mb << 20)

    async def load(self, named: Any, bucket_bytes: int) -> int:
        """Loads what an iterator yields, whether or not it is asynchronous; returns the number of buckets."""
        from sglang.srt.weight_sync.utils import update_weights
        from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

        count = 0
        async for bucket in get_named_tensor_buckets(named, bucket_bytes):
            await update_weights(
                engine=self._engine, params_batch=bucket, device_mesh_key="infer_tp", device_mesh=self._mesh
            )
            count += 1
        await self._engine.flush_cache()
        return count
