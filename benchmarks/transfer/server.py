# SPDX-License-Identifier: Apache-2.0
"""A real SGLang HTTP server in processes of its own, and how both variants bring weights to it."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from verl_sync_plugin.rollouts.sglang.request import LOADER, hand_down, new_token, pack_request
from verl_sync_plugin.rollouts.sglang.served_lora import pack_adapter, served_settings
from verl_sync_plugin.sync.endpoint import LoadOutcome, PendingLoad, RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest

START_SECONDS = 240.0
ADAPTER = "trained"
_CUDA = (
    "--attention-backend triton --mem-fraction-static 0.5 --cuda-graph-bs 1 2 4 8 --disable-piecewise-cuda-graph "
    "--enable-memory-saver"
)
_CPU = (
    "--device cpu --attention-backend torch_native --mem-fraction-static 0.1 --disable-cuda-graph "
    "--disable-overlap-schedule --max-total-tokens 2048 --context-length 256"
)


class Client:
    """Whoever knows the port of a server, and the folder of its model's config.

    Attributes:
        adapter: generation is asked of this one, where SGLang serves any.
    """

    def __init__(self, port: int, model: Path) -> None:
        self.port, self.model = port, model
        self.adapter = ""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request on a connection of its own.

        Raises:
            RuntimeError: the server answered with an error.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:500]!r}")
        return json.loads(text) if answer.headers.get_content_type() == "application/json" and text else None

    def tokens(self) -> list[int]:
        """Greedy tokens of a fixed prompt: the same for the same weights."""
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        adapter = {"lora_path": self.adapter} if self.adapter else {}
        body = {"input_ids": list(range(100, 132)), "sampling_params": sampling, **adapter}
        return list(self.ask("POST", "/generate", body)["output_ids"])


class Server(Client):
    """``sglang.launch_server`` with random weights; ended by ``stop``.

    Args:
        model: folder of the model's config.
        device: ``cuda`` or ``cpu``.
        log: where its output goes.
        options: further words of its command line.
        variables: further ones of its environment.
    """

    def __init__(
        self,
        model: Path,
        device: str,
        log: Path,
        options: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(_free_port(), model)
        common = "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --grammar-backend none"
        words = f"{common} --skip-server-warmup --log-level warning {_CPU if device == 'cpu' else _CUDA}".split()
        words += options
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port)]
        hand_down(new_token())
        env = dict(os.environ, **({"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}), **variables)
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [*command, *words, "--custom-weight-loader", LOADER], stdout=output, stderr=subprocess.STDOUT, env=env
            )
        self._log = log
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self.ask("GET", "/get_model_info")
                return
            except (OSError, RuntimeError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"SGLang did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    def schedulers(self) -> list[psutil.Process]:
        """The processes that hold the model, one per rank.

        Raises:
            RuntimeError: none is there.
        """
        below = psutil.Process(self._process.pid).children(recursive=True)
        # SGLang gives them this title
        found = [process for process in below if "sglang::scheduler" in " ".join(process.cmdline())]
        if not found:
            raise RuntimeError(f"no scheduler among {[process.cmdline() for process in below]}")
        return found

    def stop(self) -> None:
        """Ends the server and waits for it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    """A port that is free now, low enough for SGLang, which also takes the one 10000 above."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20000, 30000)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


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
        packed = base64.b64encode(pack_adapter(factors)).decode()
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
