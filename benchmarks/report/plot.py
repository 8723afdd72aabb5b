# SPDX-License-Identifier: Apache-2.0
"""Draws ``benchmarks/results/*.json``: the phase by stage, stock against plugin, and the transfer alone.

``python -m benchmarks.plot`` rewrites ``benchmarks/results/plot.svg``, ``--check`` fails when it is out of date. What
is drawn is in the digest in the picture's metadata, so the check needs no matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import floor
from benchmarks.report import table, transfer_table

OUT = table.RESULTS / "plot.svg"
STAGES = ("sleep", "resume_weights", "resume_kv", "update_weights", "rest")
_DIGEST = re.compile(r"results sha256:([0-9a-f]{64})")


def _stages(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by stage that add up to the phase.

    A stage's seconds are the slowest rank's, and the wait of one rank for another's resume counts within its
    ``update_weights``; so that takes what the others leave. ``rest``: offloading, barriers, emptying caches.
    """
    median = {name: statistics.median(run["stages"][name] for run in runs) for name in (*STAGES[:-1], "phase")}
    left = median["phase"]
    parts = {}
    for name in STAGES[:-1]:
        parts[name] = round(min(median[name], left), 6)
        left -= parts[name]
    return {**parts, "rest": round(max(0.0, left), 6)}


def _phase(result: dict[str, Any]) -> dict[str, Any]:
    by_variant = {name: [run for run in result["runs"] if run["variant"] == name] for name in table.VARIANTS}
    bars = {name: _stages(runs) for name, runs in by_variant.items() if runs}
    return {"case": result["case"], "floor": floor.of_result(result), "bars": bars}


def _transfer(result: dict[str, Any]) -> dict[str, Any]:
    seconds = {
        "stock": transfer_table.seconds_by_bucket(result, "stock", hashed=False),
        "plugin": transfer_table.seconds_by_bucket(result, "plugin", hashed=True),
    }
    return {"case": result["case"], "floor": floor.of_result(result), "seconds": seconds}


def data(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Everything that is drawn: all transfers, and the phases that stock and plugin were both measured in."""
    harnesses = {result["case"]: transfer_table.harness(result) for result in results}
    phases = [_phase(result) for result in results if harnesses[result["case"]] == "phase"]
    return {
        "phase": [phase for phase in phases if len(phase["bars"]) == len(table.VARIANTS)],
        "transfer": [_transfer(result) for result in results if harnesses[result["case"]] == "transfer"],
    }


def digest(drawn: dict[str, list[dict[str, Any]]]) -> str:
    """The picture's digest: the same as long as it would show the same numbers."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def digest_in(picture: Path) -> str | None:
    """The digest that a picture was drawn with; None where there is none."""
    if not picture.exists():
        return None
    found = _DIGEST.search(picture.read_text(encoding="utf-8"))
    return found.group(1) if found else None


def main(argv: list[str] | None = None) -> int:
    """Draws or checks; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=table.RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true", help="draw nothing; fail when the picture is out of date")
    args = parser.parse_args(argv)
    drawn = data(table.load(args.results))
    if args.check:
        fresh = digest_in(args.out) == digest(drawn)
        if not fresh:
            print(f"{args.out} is out of date: run python -m benchmarks.plot", file=sys.stderr)
        return 0 if fresh else 1
    from benchmarks.report import plot_draw

    plot_draw.draw(drawn, f"results sha256:{digest(drawn)}", args.out)
    return 0
