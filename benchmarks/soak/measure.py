# SPDX-License-Identifier: Apache-2.0
"""Many syncs in a row: whether memory, open files, threads or the time of a sync grow.

``python -m benchmarks.soak --model dense-1p8b --syncs 200 --out results.json``

Every sync brings other weights than the one before. Exit status 1 says that something grew, by ``growth.py``'s
measure, or that the engine no longer generates what it did at the start for the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import floor, gauges, machine, schema
from benchmarks.command import command_line
from benchmarks.models import SHAPES
from benchmarks.soak import growth, trainers
from benchmarks.transfer import models, rig, ways

Bench = rig.Rig | trainers.Trained
HARNESS = "soak"
LEAST_SYNCS = 24
GIVEN_BACK = "given-back"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", help="default: soak-MODEL")
    parser.add_argument("--model", choices=sorted(models.CONFIGS), required=True)
    parser.add_argument("--variant", choices=("plugin", "stock"), default="plugin")
    parser.add_argument("--trainer", choices=trainers.KINDS, default="plain", help="plain: tensors in one process")
    parser.add_argument(
        "--staging", choices=("kept", GIVEN_BACK), default="kept", help="what becomes of staging memory behind a sync"
    )
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="syncs between two samples")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for config and log; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.case = args.case or f"soak-{args.model}"
    if args.trainer != "plain" and args.variant != "plugin":
        parser.error(f"--trainer {args.trainer}: with --variant plugin")
    if args.trainer != "plain" and args.model not in SHAPES:
        parser.error(f"--trainer {args.trainer}: with --model {' or '.join(sorted(set(models.CONFIGS) & set(SHAPES)))}")
    if args.staging == GIVEN_BACK and (args.variant == "stock" or args.trainer.startswith(trainers.SEPARATE)):
        parser.error(f"--staging {GIVEN_BACK}: with the plugin and a colocated trainer")
    if args.syncs < LEAST_SYNCS or args.syncs % 2 or not 1 <= args.every <= args.syncs // 8:
        parser.error(f"--syncs: an even number from {LEAST_SYNCS} on; --every: at most an eighth of it")
    return args


def _process(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        rss, threads = process.memory_info().rss, process.num_threads()
    shared = gauges.mapped_shared_bytes(process.pid)
    return {"rss_bytes": rss, "fds": process.num_fds(), "threads": threads, "shared_bytes": shared}


def sample(bench: Bench, number: int, seconds: list[float]) -> dict[str, Any]:
    """What trainer, schedulers and device hold after sync ``number``, and ``/dev/shm`` of the whole machine."""
    found: dict[str, Any] = {"sync": number, "seconds": round(statistics.median(seconds), 6)}
    used = [gauges.device_used_bytes(device) for device in bench.devices]
    found["device_used_bytes"] = sum(map(int, filter(None, used))) if any(used) else None
    found["dev_shm_bytes"] = gauges.dev_shm_bytes()
    for kind, processes in bench.processes().items():
        parts = [_process(process) for process in processes]
        found[kind] = {name: sum(part[name] for part in parts) for name in parts[0]}
    found["trainer"].update(gauges.torch_bytes())
    return found


def _way(args: argparse.Namespace, bench: Bench) -> Any:
    """What makes the syncs."""
    if isinstance(bench, trainers.Trained):
        way: Any = bench
    else:
        way = ways.make(args.variant, bench.server, bench.named, args.bucket_mb, args.device)
    if args.staging == GIVEN_BACK:
        way.give_staging_back()
    return way


def soak(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Runs the syncs; samples, and the tokens for the first weights and for others, at the start and at the end."""
    way = _way(args, bench)
    samples: list[dict[str, Any]] = []
    tokens: dict[str, list[list[int]]] = {"first": [], "others": []}
    seconds: list[float] = []
    for number in range(1, args.syncs + 1):
        bench.other_weights()  # odd syncs bring others, even ones those of the start
        gauges.synchronize()
        started = time.perf_counter()
        way.sync()
        gauges.synchronize()
        seconds.append(time.perf_counter() - started)
        if number <= 2 or number > args.syncs - 2:
            tokens["others" if number % 2 else "first"].append(bench.server.tokens())
        if number == 1 or number % args.every == 0:
            samples.append(sample(bench, number, seconds[-args.every :]))
            print(json.dumps(samples[-1]), flush=True)
    way.close()
    return {"syncs": samples, "tokens": tokens, "growth": growth.of(samples, args.syncs, args.device)}


def problems(samples: dict[str, Any]) -> list[str]:
    """What grew, and which weights did not arrive."""
    first, others = samples["tokens"]["first"], samples["tokens"]["others"]
    found = growth.problems(samples["growth"])
    if first[0] != first[-1] or others[0] != others[-1]:
        found.append(f"at the end the engine generates other tokens than at the start: {samples['tokens']}")
    if first[0] == others[0]:
        found.append(f"other weights make no difference: {first[0]}")
    return found


def run_of(args: argparse.Namespace, samples: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """The one entry of ``runs``, in the form of ``schema``."""
    seconds = statistics.median(entry["seconds"] for entry in samples["syncs"])
    none = {"sleep": 0.0, "resume_weights": 0.0, "resume_kv": 0.0}
    settings = {
        "harness": HARNESS, "model": args.model, "bucket_mb": args.bucket_mb, "device": args.device,
        "tensors": bench.tensors, "trainer": args.trainer, "trainer_dtype": args.trainer_dtype,
        "hashed": args.variant == "plugin", "staging": args.staging,
        "floor_seconds": floor.seconds(bench.nbytes), "syncs": args.syncs, "every": args.every,
    }  # fmt: skip
    used = [entry["device_used_bytes"] for entry in samples["syncs"] if entry["device_used_bytes"] is not None]
    return {
        "variant": args.variant.partition("-")[0],
        "settings": settings,
        "stages": {**none, "update_weights": seconds, "phase": seconds},
        "samples": samples,
        "bytes": bench.nbytes,
        "peak_device_bytes": max(used, default=None),
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def measure(args: argparse.Namespace, bench: Bench) -> int:
    """Runs the syncs and writes the result, whether or not something grew; returns the exit status."""
    samples = soak(args, bench)
    result = machine.result(args.case, command_line("soak", args), [run_of(args, samples, bench)])
    assert not schema.problems(result), schema.problems(result)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    found = problems(samples)
    for problem in found:
        print(f"[{args.case}] FAILED: {problem}", file=sys.stderr, flush=True)
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """Measures one case; returns the exit status."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-soak-"))).resolve()
    if args.trainer != "plain":
        with trainers.rig(args.trainer, args.model, args.bucket_mb, work, args.device) as trained:
            return measure(args, trained)
    with rig.rig(args.model, args.device, args.trainer_dtype, work) as bench:
        return measure(args, bench)
