# SPDX-License-Identifier: Apache-2.0
"""Renders ``benchmarks/results/*.json`` as a Markdown table, between the marks of ``docs/results.md``.

``python -m benchmarks.table`` rewrites that page, ``--check`` fails when it is stale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import floor, schema
from benchmarks.report import (
    memory_table,
    pauses_table,
    report_table,
    rollouts_table,
    separate_table,
    soak_table,
    throughput_table,
    training_table,
    transfer_table,
)
from benchmarks.schema import STAGES, VARIANTS

BEGIN = "<!-- benchmarks:begin -->"
END = "<!-- benchmarks:end -->"
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = (
    "case",
    "variant",
    "sleep",
    "resume weights",
    "update weights",
    "resume kv",
    "**phase**",
    "speed-up",
    "floor",
    "× floor",
    "peak device",
    "peak host",
)
HARNESSES = ("phase", "transfer", "soak", "report", "training", "memory", "rollouts", "pauses")
EMPTY = "No results yet."


def load(folder: Path) -> list[dict[str, Any]]:
    """The results in ``folder``, by file name.

    Raises:
        ValueError: a file does not have the form.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        problems = schema.problems(result)
        if problems:
            raise ValueError(f"{path.name}: " + "; ".join(problems))
        results.append(result)
    return results


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"


def _bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f} GiB"


def _merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of repeated runs: median seconds, largest peaks."""
    devices = [run["peak_device_bytes"] for run in runs if run["peak_device_bytes"] is not None]
    return {
        "cut_short": any(run["settings"].get("exit_status") for run in runs),
        "stages": {name: statistics.median(run["stages"][name] for run in runs) for name in STAGES},
        "peak_device_bytes": max(devices) if devices else None,
        "peak_host_bytes": max(run["peak_host_bytes"] for run in runs),
    }


def _rows(result: dict[str, Any]) -> list[list[str]]:
    found = {name: [run for run in result["runs"] if run["variant"] == name] for name in VARIANTS}
    merged = {name: _merged(runs) for name, runs in found.items() if runs}
    stock = merged["stock"]["stages"]["phase"] if "stock" in merged else None
    lowest = floor.of_result(result)
    rows = []
    for variant, row in merged.items():
        phase = row["stages"]["phase"]
        faster = f"{stock / phase:.1f}×" if stock is not None and variant != "stock" else ""
        seconds = [_seconds(row["stages"][name]) for name in STAGES]
        seconds[-1] = f"**{seconds[-1]}**"
        rows.append(
            [
                result["case"],
                f"{variant} (cut short)" if row["cut_short"] else variant,
                *seconds,
                faster,
                transfer_table.milliseconds(lowest) if lowest else "–",
                f"{phase / lowest:.0f}" if lowest else "–",
                _bytes(row["peak_device_bytes"]),
                _bytes(row["peak_host_bytes"]),
            ]
        )
    return rows


def _stack(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    device = f"{machine.get('gpus')} × {machine['gpu']}" if machine["gpu"] else f"CPU ({machine.get('cpu')})"
    return ", ".join(
        [device, *(f"{name} {versions[name]}" for name in ("verl", "sglang", "torch") if name in versions)]
    )


def _where(results: list[dict[str, Any]]) -> list[str]:
    """One line per machine and stack, with the commit and day of every case measured there."""
    cases: dict[str, list[str]] = {}
    for result in results:
        named = f"`{result['case']}` ({result['commit'][:7]}, {result['date']})"
        cases.setdefault(_stack(result), []).append(named)
    return [f"- {stack}: {', '.join(named)}." for stack, named in cases.items()]


def render(results: list[dict[str, Any]]) -> str:
    """The Markdown of all results."""
    if not results:
        return EMPTY
    by_harness: dict[str, list[dict[str, Any]]] = {name: [] for name in HARNESSES}
    for result in results:
        by_harness[transfer_table.harness(result)].append(result)
    phases = by_harness["phase"]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)] if phases else []
    lines += ["| " + " | ".join(row) + " |" for result in phases for row in _rows(result)]
    lines += separate_table.render(phases)
    lines += pauses_table.render(by_harness["pauses"])
    lines += transfer_table.render(by_harness["transfer"])
    lines += throughput_table.render([*phases, *by_harness["report"]])
    lines += rollouts_table.render(by_harness["rollouts"])
    lines += report_table.render(by_harness["report"])
    lines += training_table.render(by_harness["training"])
    lines += memory_table.render(by_harness["memory"])
    lines += soak_table.render(by_harness["soak"])
    return "\n".join([*lines, "", *_where(results)]).lstrip("\n")


def replace(text: str, table: str) -> str:
    """``text`` with what stands between the marks replaced.

    Raises:
        ValueError: the marks are missing or out of order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    """Rewrites or checks the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is stale")
    args = parser.parse_args(argv)
    text = args.page.read_text(encoding="utf-8")
    fresh = replace(text, render(load(args.results)))
    if fresh == text:
        return 0
    if args.check:
        print(f"{args.page} is stale: run python -m benchmarks.table", file=sys.stderr)
        return 1
    args.page.write_text(fresh, encoding="utf-8")
    return 0
