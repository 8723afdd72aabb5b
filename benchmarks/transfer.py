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
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import gauges, machine, schema, transfer_models
from benchmarks.command import VARIANTS

DEVICE_BYTES_PER_SECOND = 4.3e12  # an H200's memory, read and written, as copies reach it
HARNESS = "transfer"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=sorted(transfer_models.CONFIGS), required=True)
    parser.add_argument("--buckets", default="512", help="bucket sizes in MiB, for both variants")
    parser.add_argument("--variants", default="stock,plugin,plugin-unhashed")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per variant and bucket size")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for config and log; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def _manager(server: Any, named: list[tuple[str, Any]], bucket_mb: int, hashed: bool, device: str) -> Any:
    """The plugin's sharding manager over plain tensors, one owner each."""
    import torch

    from benchmarks.transfer_server import ServerEndpoint
    from verl_sync_plugin.bucket import Base, View
    from verl_sync_plugin.config import SyncConfig
    from verl_sync_plugin.sharding_manager.base import ShardingManager
    from verl_sync_plugin.source.base import ParameterSource, Shard, dtype_name

    class PlainSource(ParameterSource):
        def __init__(self) -> None:
            super().__init__()
            self._shards = [self._shard(name, tensor) for name, tensor in named]

        def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
            views = (View(name, tuple(tensor.shape), 0, tensor.numel()),)
            base = Base(name, dtype_name(tensor.dtype), tensor.element_size(), (tensor.numel(),), views)
            return Shard(base, partial(tensor.view, -1), run=tensor)

        def shards(self) -> list[Shard]:
            return self._shards

    class PlainManager(ShardingManager):
        def open_source(self) -> ParameterSource:
            return PlainSource()

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config = SyncConfig(verify_hashes=hashed)
    return PlainManager(None, ServerEndpoint(server), config, bucket_mb << 20, where)


class Stock:
    """verl's own transfer."""

    def __init__(self, server: Any, named: list[tuple[str, Any]], bucket_mb: int) -> None:
        from benchmarks.transfer_server import StockPath

        self._path, self._named, self._bucket_mb = StockPath(server), named, bucket_mb

    def sync(self) -> dict[str, Any]:
        return {"buckets": asyncio.run(self._path.sync(self._named, self._bucket_mb))}

    def close(self) -> None:
        pass


class Plugin:
    """The plugin's transfer; the report is its own profile."""

    def __init__(self, server: Any, named: list[tuple[str, Any]], bucket_mb: int, hashed: bool, device: str) -> None:
        self._manager = _manager(server, named, bucket_mb, hashed, device)
        self._version = 0

    def sync(self) -> dict[str, Any]:
        self._version += 1
        return asyncio.run(self._both()).as_dict()

    async def _both(self) -> Any:
        await self._manager.update_weights([], self._version)
        return await self._manager.finish([])

    def close(self) -> None:
        self._manager._sender.close()


def measure(make: Callable[[], Any], server: Any, named: list[tuple[str, Any]], repeat: int) -> dict[str, Any]:
    """One variant: a sync of other weights, one that counts apart (it sets things up), then the measured ones.

    Raises:
        RuntimeError: the server generates the same with other weights, so that nothing proves that they arrived.
    """
    way = make()
    samples = []
    head = named[-1][1]
    for number in range(repeat + 2):
        if number < 2:
            head.copy_(head.flip(0))  # other weights, then the right ones again
        gauges.synchronize()
        started = time.perf_counter()
        report = way.sync()
        gauges.synchronize()
        samples.append({"seconds": round(time.perf_counter() - started, 6), "report": report})
        print(json.dumps(samples[-1]), flush=True)
        if number == 0:
            other = server.tokens()
    way.close()
    tokens = server.tokens()
    if tokens == other:
        raise RuntimeError(f"other weights make no difference: {tokens}")
    return {"first_syncs": samples[:2], "syncs": samples[2:], "tokens": tokens}


def run_of(
    args: argparse.Namespace, variant: str, bucket_mb: int, samples: dict[str, Any], nbytes: int, tensors: int
) -> dict[str, Any]:
    """One entry of ``runs``; the stages that this harness does not have are zero."""
    seconds = statistics.median(sample["seconds"] for sample in samples["syncs"])
    none = {"sleep": 0.0, "resume_weights": 0.0, "resume_kv": 0.0}
    settings = {
        "harness": HARNESS, "model": args.model, "bucket_mb": bucket_mb, "device": args.device, "tensors": tensors,
        "hashed": variant == "plugin", "floor_seconds": 2 * nbytes / DEVICE_BYTES_PER_SECOND,
    }  # fmt: skip
    return {
        "variant": variant.partition("-")[0],
        "settings": settings,
        "stages": {**none, "update_weights": seconds, "phase": seconds},
        "samples": samples,
        "bytes": nbytes,
        "peak_device_bytes": gauges.device_used_bytes(gauges.current_device()),
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def result_of(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole result, in the form of ``schema``."""
    words = f"--case {args.case} --model {args.model} --buckets {args.buckets} --variants {args.variants}"
    return {
        "case": args.case,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f"python -m benchmarks.transfer {words} --repeat {args.repeat} --device {args.device}",
        "runs": runs,
    }


def compare(args: argparse.Namespace, work: Path) -> None:
    """Measures every variant and bucket size on one server, and writes the result after each.

    Raises:
        RuntimeError: a variant left other weights in the server than the first one.
    """
    from benchmarks.transfer_server import Server

    config = transfer_models.write_config(args.model, work / args.model)
    named = transfer_models.weights(args.model, args.device)
    nbytes = sum(tensor.nbytes for _, tensor in named)
    server = Server(config, args.device, work / f"{args.case}-server.log")
    runs: list[dict[str, Any]] = []
    tokens: list[int] = []
    try:
        for variant in args.variants.split(","):
            for bucket_mb in map(int, args.buckets.split(",")):
                if variant == "stock":
                    make = partial(Stock, server, named, bucket_mb)
                else:
                    make = partial(Plugin, server, named, bucket_mb, variant == "plugin", args.device)
                print(f"[{args.case}] {variant} {bucket_mb} MiB", flush=True)
                samples = measure(make, server, named, args.repeat)
                generated = samples["tokens"]
                tokens = tokens or generated
                if generated != tokens:
                    raise RuntimeError(f"{variant}: the server generates {generated}, not {tokens}")
                runs.append(run_of(args, variant, bucket_mb, samples, nbytes, len(named)))
                result = result_of(args, runs)
                assert not schema.problems(result), schema.problems(result)
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    finally:
        server.stop()


def main(argv: list[str] | None = None) -> int:
    """Measures one case; raises when a variant fails."""
    args = arguments(argv)
    unknown = {name.partition("-")[0] for name in args.variants.split(",")} - set(VARIANTS)
    if unknown:
        raise SystemExit(f"unknown variants {sorted(unknown)}; choose from {', '.join(VARIANTS)}, plugin-unhashed")
    import torch.distributed as dist

    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-transfer-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{work}/store-{os.getpid()}", rank=0, world_size=1)
    try:
        compare(args, work)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
