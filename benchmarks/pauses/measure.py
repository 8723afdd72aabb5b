# SPDX-License-Identifier: Apache-2.0
"""Times how long an SGLang engine with requests in flight is paused for a sync, beyond the load of the weights.

``python -m benchmarks.pauses --case pauses-dense-7b-1gpu --model 7b --out FILE``

One engine with random weights is behind verl's server (``stock``) and behind ours in each mode of
``custom.sync.pause``. They get the calls of a sync of a separate rollout while ``--requests`` requests are answered.
The load is of one norm alone: everything else is timed. ``gap`` is the longest time between two tokens of one request
more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import gauges, machine, models, schema
from benchmarks.command import command_line
from benchmarks.pauses.paused import STOCK, WAYS, Way, engine
from benchmarks.transfer import rig

HARNESS = "pauses"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pauses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--requests", type=int, default=64, help="in flight at every sync")
    parser.add_argument("--tokens", type=int, default=256, help="of every answer")
    parser.add_argument("--ahead", type=int, default=64, help="tokens of the one that is watched, before the sync")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per way, behind one that warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for the model's config; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.ways = args.ways.split(",")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; choose from {', '.join(WAYS)}")
    return args


def run_of(args: argparse.Namespace, way: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of ``runs``."""
    seconds = statistics.median(sample["seconds"] for sample in samples)
    settings = {"harness": HARNESS, "way": way, "model": args.model, "device": args.device}
    return {
        "variant": STOCK if way == STOCK else "plugin",
        "settings": {**settings, "requests": args.requests, "tokens": args.tokens},
        "stages": {**dict.fromkeys(schema.STAGES, 0.0), "phase": seconds},
        "samples": {"syncs": samples},
        "bytes": None,
        "peak_device_bytes": None,
        "peak_host_bytes": gauges.rss_peak_bytes(),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures one case and writes the result after each way; raises when one fails."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-pauses-"))).resolve()
    runs: list[dict[str, Any]] = []
    folder = work / f"{args.model}-dummy"
    with rig.one_rank(work), engine(args, folder) as made:
        asyncio.set_event_loop(made.loop)
        for name in args.ways:
            way = Way(name, made, folder, args)
            runs.append(run_of(args, name, made.loop.run_until_complete(way.samples())))
            way.close()
            result = machine.result(args.case, command_line("pauses", args), runs)
            assert not schema.problems(result), schema.problems(result)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
