# SPDX-License-Identifier: Apache-2.0
"""How long an engine with requests in flight is paused, beyond the load of the weights."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report.transfer_table import milliseconds

HEAD = ("case", "server", "`custom.sync.pause`", "requests", "paused, median", "shortest to longest", "gap", "syncs")


def _row(result: dict[str, Any], run: dict[str, Any]) -> list[str]:
    samples, settings = run["samples"]["syncs"], run["settings"]
    paused = [float(sample["seconds"]) for sample in samples]
    gaps = [float(sample["gap"]) for sample in samples if sample["gap"] is not None]
    ours = run["variant"] == "plugin"
    return [
        f"`{result['case']}`",
        "ours" if ours else "verl's",
        f"`{settings['way']}`" if ours else "–",
        str(settings["requests"]),
        milliseconds(statistics.median(paused)),
        f"{milliseconds(min(paused))} to {milliseconds(max(paused))}",
        milliseconds(statistics.median(gaps)) if gaps else "–",
        str(len(samples)),
    ]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; nothing without results."""
    if not results:
        return []
    title = (
        "An engine with requests in flight, paused for a sync that loads nothing to speak of; the gap is the longest"
    )
    title += " time between two tokens of a request that stays in the engine:"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    rows = [_row(result, run) for result in results for run in result["runs"]]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
