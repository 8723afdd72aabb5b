# SPDX-License-Identifier: Apache-2.0
"""The table of the transfer alone, with the plugin's own profile."""

from __future__ import annotations

import statistics
from typing import Any

HEAD = ("case", "variant", "bucket", "**transfer**", "× floor", "speed-up", "weights", "connect", "pack")
HEAD += ("wait for copies", "wait for engine", "commit", "flush")
# The plugin's report of one sync, stages on the trainer's side; "update_weights" is all but the flush
PROFILE = ("update_weights", "connect", "pack", "gather", "wait_engine", "commit", "resume_kv")


def is_transfer(result: dict[str, Any]) -> bool:
    return all(run["settings"].get("harness") == "transfer" for run in result["runs"])


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def _profile(run: dict[str, Any]) -> list[str]:
    reports = [sample["report"] for sample in run["samples"]["syncs"]]
    if "stages" not in reports[0]:
        return [""] * len(PROFILE)
    return [_milliseconds(statistics.median(report["stages"].get(name, 0.0) for report in reports)) for name in PROFILE]


def _rows(result: dict[str, Any]) -> list[list[str]]:
    stock = {
        run["settings"]["bucket_mb"]: run["stages"]["phase"] for run in result["runs"] if run["variant"] == "stock"
    }
    rows = []
    for run in sorted(result["runs"], key=lambda run: (run["variant"] != "stock", not run["settings"]["hashed"])):
        settings, seconds = run["settings"], run["stages"]["phase"]
        other = stock.get(settings["bucket_mb"])
        unhashed = run["variant"] == "plugin" and not settings["hashed"]
        faster = f"{other / seconds:.1f}×" if other is not None and run["variant"] != "stock" else ""
        rows.append(
            [
                result["case"],
                run["variant"] + (", no hashes" if unhashed else ""),
                f"{settings['bucket_mb']} MiB",
                f"**{_milliseconds(seconds)}**",
                f"{seconds / settings['floor_seconds']:.1f}",
                faster,
                *_profile(run),
            ]
        )
    return rows


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; none without results."""
    if not results:
        return []
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(row) + " |" for result in results for row in _rows(result)]
    notes = []
    for result in results:
        run = result["runs"][0]
        moved = f"{run['settings']['tensors']} tensors, {run['bytes'] / 1e9:.2f} GB of bf16"
        notes.append(f"- `{result['case']}`: {moved}; floor {_milliseconds(run['settings']['floor_seconds'])}.")
    return ["", *lines, "", *notes]
