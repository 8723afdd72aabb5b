# SPDX-License-Identifier: Apache-2.0
"""Times the transfer alone: from a trainer process with all weights on one device into a real SGLang server.

``python -m benchmarks.transfer --case transfer-dense-7b-1gpu --model dense-7b --buckets 512,2048 --out results.json``

Both variants start from the same tensors and end when the same server has answered; ``floor`` is what reading and
writing every byte once would take at the memory's measured rate. After every variant the server must generate the
same tokens. ``--profile FOLDER`` then takes one more sync of each apart (``profiling.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import floor, gauges, machine, profiling, schema
from benchmarks.command import command_line
from benchmarks.transfer import models, peer, rig, ways

HARNESS = "transfer"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=sorted(models.CONFIGS), required=True)
    parser.add_argument("--buckets", default="512", help="bucket sizes in MiB, for both variants")
    parser.add_argument("--variants", default="stock,plugin,plugin-staged")
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per variant and bucket size")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also trace one sync of each, in both processes")
    parser.add_argument("--work", type=Path, help="folder for config and log; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    known = ("stock", *ways.PLUGIN, peer.NAME)
    unknown = set(args.variants.split(",")) - set(known)
    if unknown:
        parser.error(f"unknown variants {sorted(unknown)}; choose from {', '.join(known)}")
    if peer.NAME in args.variants.split(",") and args.device != "cuda":
        parser.error(f"--variants {peer.NAME}: with --device cuda")
    return args


def measure(way: Any, bench: Any, repeat: int) -> dict[str, Any]:
    """One variant: a sync of other weights, one that counts apart (it sets things up), then the measured ones.

    Args:
        way: what syncs.
        bench: a ``rig.Rig``, or what has its ``other_weights`` and ``server``.
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
        seconds = time.perf_counter() - started - report.get(peer.REGISTRATION, 0.0)
        samples.append({"seconds": round(seconds, 6), "report": report})
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
        "hashed": variant not in ("stock", *schema.PEERS), "staged": variant == "plugin-staged",
        "verify": ways.verify_of(variant),
        "floor_seconds": floor.seconds(bench.nbytes),
    }  # fmt: skip
    return {
        "variant": variant if variant in schema.PEERS else variant.partition("-")[0],
        "settings": settings,
        "stages": {**none, "update_weights": seconds, "phase": seconds},
        "samples": samples,
        "bytes": bench.nbytes,
        "peak_device_bytes": gauges.device_used_bytes(gauges.current_device()),
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def _ways(args: argparse.Namespace, bench: rig.Rig) -> Iterator[tuple[str, int, Any]]:
    """Every variant with every bucket size; closed when the next one is asked for."""
    for variant, bucket_mb in itertools.product(args.variants.split(","), map(int, args.buckets.split(","))):
        print(f"[{args.case}] {variant} {bucket_mb} MiB", flush=True)
        way = ways.make(variant, bench.server, bench.named, bucket_mb, args.device)
        yield variant, bucket_mb, way
        way.close()


def compare(args: argparse.Namespace, bench: rig.Rig) -> dict[str, Any]:
    """Measures every variant and bucket size on one server, and writes the result after each.

    Raises:
        RuntimeError: a variant left other weights in the server than the first one.
    """
    runs: list[dict[str, Any]] = []
    for variant, bucket_mb, way in _ways(args, bench):
        samples = measure(way, bench, args.repeat)
        if peer.NAME in args.variants.split(","):  # a peer proves nothing itself; SGLang's own checksums do
            samples["digest"] = peer.digest(bench.server)
        runs.append(run_of(args, variant, bucket_mb, samples, bench))
        expected = runs[0]["samples"]["tokens"]
        if samples["tokens"] != expected:
            raise RuntimeError(f"{variant}: the server generates {samples['tokens']}, not {expected}")
        if samples.get("digest") != runs[0]["samples"].get("digest"):
            raise RuntimeError(f"{variant}: the server holds other weights than after {runs[0]['variant']}")
        result = machine.result(args.case, command_line("transfer", args), runs)
        assert not schema.problems(result), schema.problems(result)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def profile(args: argparse.Namespace, bench: rig.Rig, result: dict[str, Any]) -> None:
    """Traces one sync of each. After everything is measured: a profiler that ran slows its process from then on."""
    profiles: list[dict[str, Any]] = []
    for (variant, bucket_mb, way), run in zip(_ways(args, bench), result["runs"], strict=True):
        measure(way, bench, 0)
        summary = profiling.take(way, bench, args.profile, f"{args.case}-{variant}-{bucket_mb}mb")
        where = {"variant": variant, "bucket_mb": bucket_mb, "unprofiled_seconds": run["stages"]["phase"]}
        profiles.append({**where, **summary})
        profiling.write(args.profile, result, profiles)


def main(argv: list[str] | None = None) -> int:
    """Measures one case; raises when a variant fails."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-transfer-"))).resolve()
    with rig.rig(args.model, args.device, args.trainer_dtype, work, peer.NAME in args.variants) as bench:
        result = compare(args, bench)
        if args.profile is not None:
            profile(args, bench, result)
    return 0
