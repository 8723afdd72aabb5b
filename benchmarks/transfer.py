# SPDX-License-Identifier: Apache-2.0
"""Times the transfer alone: from a trainer process with all weights on one device into a real SGLang server.

``python -m benchmarks.transfer --case transfer-dense-7b-1gpu --model dense-7b --buckets 512,2048 --out results.json``

Both variants start from the same tensors and end when the same server has answered; ``floor`` is what reading and
writing every byte once would take at the memory's measured rate. After every variant the server must generate the
same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks import common, gauges
from benchmarks.common import command_line
from benchmarks.models import SHAPES
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.rollouts import rollout_of
from verl_sync_plugin.rollouts.sglang.lora import served_settings
from verl_sync_plugin.rollouts.sglang.request import LOADER, dumps, hand_down, new_token, pack_request
from verl_sync_plugin.sync.endpoint import RolloutEndpoint
from verl_sync_plugin.transport.protocol import LoadRequest

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}  # fmt: skip
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
# Qwen3-30B-A3B with half of its experts, and with experts half as wide: twice the tensors, equal bytes
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SHAPES["moe-8b"], "num_hidden_layers": 48,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip
_TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense-1p8b": {**_QWEN2, **SHAPES["1p8b"]},
    "dense-7b": {**_QWEN2, **SHAPES["7b"]},
    "moe-8b": {**_MOE, "num_hidden_layers": 24},
    "moe-10k": _MOE,
    "moe-19k": {**_MOE, "num_experts": 128, "moe_intermediate_size": 384},
    "small": {**_QWEN2, **SHAPES["small"]},
    "tiny": {**_QWEN2, **SHAPES["tiny"]},
    "tiny-moe": {
        **_MOE, **_TINY, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def write_config(kind: str, folder: Path) -> Path:
    """Writes ``config.json`` for a server that makes up its own weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **CONFIGS[kind]}), encoding="utf-8")
    return folder


def shapes(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the model."""
    c = CONFIGS[kind]
    hidden = c["hidden_size"]
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (c["vocab_size"], hidden))]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found += _attention(c, f"{prefix}self_attn.") + _mlp(c, f"{prefix}mlp.")
        found += [(f"{prefix}{norm}_layernorm.weight", (hidden,)) for norm in ("input", "post_attention")]
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (c["vocab_size"], hidden))]


def _attention(c: dict[str, Any], prefix: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden = c["hidden_size"]
    head = c.get("head_dim", hidden // c["num_attention_heads"])
    rows = {"q": c["num_attention_heads"] * head, "k": c["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    found: list[tuple[str, tuple[int, ...]]] = [(f"{prefix}{x}_proj.weight", (rows[x], hidden)) for x in "qkv"]
    found.append((f"{prefix}o_proj.weight", (hidden, rows["q"])))
    if c["model_type"] == "qwen2":
        return [*found, *((f"{prefix}{x}_proj.bias", (rows[x],)) for x in "qkv")]
    return [*found, *((f"{prefix}{x}_norm.weight", (head,)) for x in "qk")]


def _mlp(c: dict[str, Any], prefix: str) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    parts = [prefix]
    found: list[tuple[str, tuple[int, ...]]] = []
    if "num_experts" in c:
        inner = c["moe_intermediate_size"]
        parts = [f"{prefix}experts.{expert}." for expert in range(c["num_experts"])]
        found.append((f"{prefix}gate.weight", (c["num_experts"], hidden)))
    for part in parts:
        found += [(f"{part}gate_proj.weight", (inner, hidden)), (f"{part}up_proj.weight", (inner, hidden))]
        found.append((f"{part}down_proj.weight", (hidden, inner)))
    return found


def random_weights(kind: str, device: str, dtype: str, folder: Path) -> list[tuple[str, Any]]:
    """Random tensors: on a GPU each an allocation of its own as a trainer's parameters are, on a CPU in one file in
    ``folder``, which other processes can map as they can all device memory."""
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    made = []
    for (name, _), tensor in zip(shapes(kind), _memory(kind, device, getattr(torch, dtype), folder), strict=True):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        made.append((name, tensor))
    return made


def _memory(kind: str, device: str, dtype: Any, folder: Path) -> Iterator[Any]:
    import torch

    wanted = [shape for _, shape in shapes(kind)]
    if device != "cpu":
        yield from (torch.empty(shape, dtype=dtype, device=device) for shape in wanted)
        return
    places = [0, *itertools.accumulate(math.prod(shape) + -math.prod(shape) % 8 for shape in wanted)]  # 16-byte steps
    storage = torch.UntypedStorage.from_file(str(folder / f"{kind}.weights"), True, places[-1] * dtype.itemsize)
    flat = torch.empty(0, dtype=dtype).set_(storage)
    yield from (
        flat[place : place + math.prod(shape)].view(shape) for place, shape in zip(places, wanted, strict=False)
    )


START_SECONDS = 240.0
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
        loaders: custom weight loaders next to the plugin's, as SGLang names them.
    """

    def __init__(
        self,
        model: Path,
        device: str,
        log: Path,
        options: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        loaders: Sequence[str] = (),
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
            command += [*words, "--custom-weight-loader", LOADER, *loaders]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
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


ADAPTER = "trained"


class ServerEndpoint(RolloutEndpoint):
    """The server as the plugin's sharding manager sees it: one POST per sync.

    Args:
        server: of one engine rank.
        ranks: see ``RolloutEndpoint``.
    """

    def __init__(self, server: Client, ranks: tuple[int, ...] = (0,)) -> None:
        super().__init__(rollout_of("sglang"), None, ranks, timeout_seconds=300.0)
        self._server, self.leader = server, True
        self._flushing: Future[float] | None = None

    async def resume(self, tags: list[str]) -> None:
        raise AssertionError("the benchmark's server never sleeps")

    async def finish(self, tags: list[str]) -> None:
        flushing, self._flushing = self._flushing or _asked(self._server, "GET", "/flush_cache"), None
        await asyncio.wrap_future(flushing)

    def flush_after_load(self) -> None:
        self._flushing = _asked(self._server, "GET", "/flush_cache")

    async def abandon(self, why: str) -> None:
        print(f"sync failed: {why}", flush=True)

    async def publish(self, report: SyncReport) -> None:
        pass

    async def load_adapter(self, config: Any, factors: Any, weight_version: str | None) -> tuple[float, int]:
        server, body = self._server, {"lora_name": ADAPTER}
        if server.adapter:
            await asyncio.to_thread(server.ask, "POST", "/unload_lora_adapter", body)
        packed = base64.b64encode(dumps(factors)).decode()
        body = {**body, "config_dict": served_settings(config, factors), "serialized_tensors": packed}
        await asyncio.to_thread(server.ask, "POST", "/load_lora_adapter_from_tensors", body)
        server.adapter = ADAPTER
        return 0.0, len(packed)

    def start_load(self, request: LoadRequest, weight_version: str | None) -> Future[float]:
        blob = base64.b64encode(pack_request(request.to_wire())).decode()
        body = {"serialized_named_tensors": [blob], "load_format": LOADER, "flush_cache": False}
        return _asked(self._server, "POST", "/update_weights_from_tensor", body)


def _asked(server: Client, *question: Any) -> Future[float]:
    """Asks in a thread."""
    future: Future[float] = Future()

    def ask() -> None:
        try:
            server.ask(*question)
            future.set_result(0.0)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return future


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


VARIANTS = ("stock", "plugin", "plugin-staged")  # the last packs every sync, as where nothing lies still


def _plain_manager(server: Any, named: list[tuple[str, Any]], bucket_mb: int, variant: str, device: str) -> Any:
    """The plugin's sharding manager over plain tensors, one owner each."""
    import torch

    from verl_sync_plugin.config.settings import SyncConfig
    from verl_sync_plugin.layout.tensors import Base, Shard, View
    from verl_sync_plugin.sync.manager import ShardingManager
    from verl_sync_plugin.trainers.base import ParameterSource

    class PlainSource(ParameterSource):
        def __init__(self) -> None:
            super().__init__()
            self._shards = [self._shard(name, tensor) for name, tensor in named]

        def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
            views = (View(name, tuple(tensor.shape), 0, tensor.numel()),)
            return Shard(Base(name, "bfloat16", 2, (tensor.numel(),), views), partial(tensor.view, -1), run=tensor)

        def shards(self) -> list[Shard]:
            return self._shards

    class PlainManager(ShardingManager):
        def open_source(self) -> ParameterSource:
            return PlainSource()

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config = SyncConfig(delivery="staged" if variant == "plugin-staged" else "auto")
    return PlainManager(None, ServerEndpoint(server), config, bucket_mb << 20, where)


class Stock:
    """verl's own transfer."""

    def __init__(self, server: Any, named: list[tuple[str, Any]], bucket_mb: int) -> None:
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
        report: dict[str, Any] = asyncio.run(self._both()).as_dict()
        return {key: value for key, value in report.items() if key not in ("spans", "spans_left_out", "origin")}

    async def _both(self) -> Any:
        await self._manager.update_weights([], self._version)
        return await self._manager.finish([])

    def close(self) -> None:
        self._manager.sender.close()


def make_way(variant: str, server: Any, named: list[tuple[str, Any]], bucket_mb: int, device: str) -> Any:
    """The way of one of ``VARIANTS``."""
    if variant == "stock":
        return Stock(server, named, bucket_mb)
    return Plugin(_plain_manager(server, named, bucket_mb, variant, device))


@dataclass(frozen=True)
class Rig:
    """Both ends of a sync.

    Attributes:
        server: a ``Server``.
        named: the trainer's tensors by HF name, each an allocation of its own.
        device: ``cuda`` or ``cpu``.
        nbytes: bytes of the weights in bf16, whatever the trainer holds.
        devices: the GPUs whose memory matters.
    """

    server: Any
    named: list[tuple[str, Any]]
    device: str
    nbytes: int
    devices: tuple[int, ...] = (0,)

    @property
    def tensors(self) -> int:
        return len(self.named)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All whose growth matters, by what they are."""
        return {"trainer": [psutil.Process()], "schedulers": self.server.schedulers()}

    def other_weights(self) -> None:
        """Turns the trainer's weights into others, and at the next call back into what they were."""
        head = self.named[-1][1]
        head.copy_(head.flip(0))


@contextmanager
def one_rank(work: Path, device: str = "cpu") -> Iterator[None]:
    """This process is the only rank of a trainer; ends every process below it in the end.

    Args:
        work: a folder.
        device: where its collectives are: verl's training engines have some, on a GPU by NCCL; plain tensors have none.
    """
    import torch.distributed as dist

    work.mkdir(parents=True, exist_ok=True)
    # a visit's time limit ends this process alone; unwinding is what ends the server, with its device memory
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    common.become_subreaper()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{work}/store-{os.getpid()}", rank=0, world_size=1)
    try:
        yield
    finally:
        common.end_descendants()
        dist.destroy_process_group()


@contextmanager
def rig(model: str, device: str, dtype: str, work: Path) -> Iterator[Rig]:
    """Starts the server and makes the weights; ends every process below this one."""
    with one_rank(work):
        config = write_config(model, work / model)
        named = random_weights(model, device, dtype, work)
        server = Server(config, device, work / f"{model}-server.log")
        try:
            yield Rig(server, named, device, sum(2 * tensor.numel() for _, tensor in named))
        finally:
            server.stop()


HARNESS = "transfer"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = common.parser_of(HARNESS, __doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--buckets", default="512", help="bucket sizes in MiB, for both variants")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per variant and bucket size")
    args = parser.parse_args(argv)
    if unknown := set(args.variants.split(",")) - set(VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}; choose from {', '.join(VARIANTS)}")
    return args


def measure(way: Any, bench: Any, repeat: int) -> dict[str, Any]:
    """One variant: a sync of other weights, one that counts separately (it sets things up), then the measured ones.

    Args:
        way: what syncs.
        bench: a ``Rig``, or what has its ``other_weights`` and ``server``.
        repeat: measured syncs.

    Raises:
        RuntimeError: the server generates the same with other weights, so that nothing proves that they arrived.
    """
    samples = []
    for number in range(repeat + 2):
        if number < 2:
            bench.other_weights()  # and then the right ones again
        gauges.synchronize()
        started = time.perf_counter()
        report = way.sync()
        gauges.synchronize()
        samples.append({"seconds": round(time.perf_counter() - started, 6), "report": report})
        print(json.dumps(samples[-1]), flush=True)
        if number == 0:
            other = bench.server.tokens()
    tokens = bench.server.tokens()
    if tokens == other:
        raise RuntimeError(f"other weights make no difference: {tokens}")
    return {"first_syncs": samples[:2], "syncs": samples[2:], "tokens": tokens}


def run_of(
    args: argparse.Namespace, variant: str, bucket_mb: int, samples: dict[str, Any], bench: Any
) -> dict[str, Any]:
    """One entry of ``runs``; the stages that this harness does not have are zero. ``bench`` tells how much was sent."""
    seconds = statistics.median(sample["seconds"] for sample in samples["syncs"])
    none = {"sleep": 0.0, "resume_weights": 0.0, "resume_kv": 0.0}
    settings = {
        "harness": HARNESS, "model": args.model, "bucket_mb": bucket_mb, "device": args.device,
        "tensors": bench.tensors, "trainer_dtype": args.trainer_dtype,
        "staged": variant == "plugin-staged",
        "floor_seconds": common.floor_seconds(bench.nbytes),
    }  # fmt: skip
    return {
        "variant": variant.partition("-")[0],
        "settings": settings,
        "stages": {**none, "update_weights": seconds, "phase": seconds},
        "samples": samples,
        "bytes": bench.nbytes,
        "peak_device_bytes": gauges.device_used_bytes(gauges.current_device()),
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def _ways(args: argparse.Namespace, bench: Rig) -> Iterator[tuple[str, int, Any]]:
    """Every variant with every bucket size; closed when the next one is asked for."""
    for variant, bucket_mb in itertools.product(args.variants.split(","), map(int, args.buckets.split(","))):
        print(f"[{args.case}] {variant} {bucket_mb} MiB", flush=True)
        way = make_way(variant, bench.server, bench.named, bucket_mb, args.device)
        yield variant, bucket_mb, way
        way.close()


def compare(args: argparse.Namespace, bench: Rig) -> None:
    """Measures every variant and bucket size on one server, and writes the result after each.

    Raises:
        RuntimeError: a variant left other weights in the server than the first one.
    """
    runs: list[dict[str, Any]] = []
    for variant, bucket_mb, way in _ways(args, bench):
        samples = measure(way, bench, args.repeat)
        runs.append(run_of(args, variant, bucket_mb, samples, bench))
        expected = runs[0]["samples"]["tokens"]
        if samples["tokens"] != expected:
            raise RuntimeError(f"{variant}: the server generates {samples['tokens']}, not {expected}")
        common.write_result(args.out, common.result_of(args.case, command_line("transfer", args), runs))


def main(argv: list[str] | None = None) -> int:
    """Measures one case; raises when a variant fails."""
    args = arguments(argv)
    with rig(args.model, args.device, args.trainer_dtype, common.work_of(args)) as bench:
        compare(args, bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
