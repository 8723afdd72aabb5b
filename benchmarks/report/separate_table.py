# SPDX-License-Identifier: Apache-2.0
"""Separate rollouts: how long the engines were paused, and how fast the weights came over the link."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.schema import VARIANTS

HEAD = ("case", "variant", "whole", "ranks", "paused", "engine load", "of the link", "syncs")
# of a sync's report: how long the engine rank read and wrote
LOAD = "stage/engine_load"


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _milliseconds(seconds: float | None) -> str:
    return "–" if not seconds else f"{seconds * 1e3:.0f} ms"


def standing(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The syncs of a group that stands and has nothing left to set up: all but the first two."""
    return list(run["samples"]["syncs"][1:])


def link_share(result: dict[str, Any], run: dict[str, Any], seconds: float | None) -> str:
    """How fast the bytes of a run came in ``seconds``, and how much that is of what the link was measured to carry."""
    if not seconds or not run["bytes"]:
        return "–"
    rate = run["bytes"] / seconds
    carried = result["machine"].get("link_bytes_per_second")
    return f"{rate / 1e9:.0f} GB/s" + (f", {rate / carried:.0%} of {carried / 1e9:.0f}" if carried else "")


def _row(result: dict[str, Any], run: dict[str, Any]) -> list[str] | None:
    syncs = standing(run)
    if not syncs:
        return None
    outer = [sync["outer"] for sync in syncs]
    ranks = _median([sync["stages"]["update_weights"] for sync in syncs])
    paused = _median([each["paused"] for each in outer if each.get("paused")])
    load = _median([sync["report"][LOAD] for sync in syncs if LOAD in sync["report"]])
    times = [f"{paused / part:.2f} × {name}" for part, name in ((ranks, "ranks"), (load, "load")) if paused and part]
    return [
        result["case"],
        run["variant"],
        _milliseconds(_median([each["call"] for each in outer])),
        _milliseconds(ranks),
        _milliseconds(paused) + (f" ({', '.join(times)})" if times else ""),
        _milliseconds(load),
        link_share(result, run, load),
        str(len(syncs)),
    ]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; none where no separate rollout was measured."""
    separate = [result for result in results if result["runs"][0]["settings"].get("rollout_gpus")]
    rows = []
    for result in separate:
        in_order = sorted(result["runs"], key=lambda run: VARIANTS.index(run["variant"]))
        rows += [row for run in in_order if (row := _row(result, run))]
    if not rows:
        return []
    title = (
        "Separate rollouts from the third sync on (medians): verl's whole call in the driver, the slowest rank's part"
    )
    title += " of it, how long an engine generated nothing, and how long the engine rank read and wrote:"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
