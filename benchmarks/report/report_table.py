# SPDX-License-Identifier: Apache-2.0
"""The table of what is known by the plugin's own clock alone (``report_only.py``)."""

from __future__ import annotations

from typing import Any

from benchmarks.schema import STAGES

HEAD = ("case", *(name.replace("_", " ") for name in STAGES), "peak beyond before, first sync", "later")
TITLE = "By the plugin's own reports (no stock run beside them, so no speed-up):"


def _mebibytes(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"


def _row(result: dict[str, Any]) -> list[str]:
    (run,) = result["runs"]
    seconds = [f"{run['stages'][name]:.3f} s" for name in STAGES]
    samples = run["samples"]
    later = max(sync["peak_device_bytes"] for sync in samples["syncs"])
    only = " (first sync only)" if run["settings"].get("first_sync_only") else ""
    return [
        f"`{result['case']}`{only}",
        *seconds,
        _mebibytes(samples["first_sync"]["peak_device_bytes"]),
        _mebibytes(later),
    ]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; none without results."""
    if not results:
        return []
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return ["", TITLE, "", *lines, *("| " + " | ".join(_row(result)) + " |" for result in results)]
