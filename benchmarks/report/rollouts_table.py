# SPDX-License-Identifier: Apache-2.0
"""Seconds of rollouts of the engine alone, with their spread: the adapter merged, and served."""

from __future__ import annotations

import statistics
from typing import Any

HEAD = ("case", "variant", "adapter", "rollouts", "median", "shortest to longest", "tokens per second")


def _row(result: dict[str, Any], run: dict[str, Any]) -> list[str]:
    seconds = [float(sample["seconds"]) for sample in run["samples"]["syncs"]]
    median = statistics.median(seconds)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f} s"
    rate = f"{run['samples']['syncs'][0]['tokens'] / median:.0f}"
    way = run["settings"]["way"]
    return [f"`{result['case']}`", run["variant"], way, str(len(seconds)), f"{median:.2f} s", spread, rate]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; nothing without results."""
    if not results:
        return []
    title = "Seconds of a rollout of SGLang alone, every answer of the same length, with the adapter merged and served:"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    rows = [_row(result, run) for result in results for run in result["runs"]]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
