# SPDX-License-Identifier: Apache-2.0
"""What the soak runs say, in one line each."""

from __future__ import annotations

from typing import Any

from benchmarks.report.transfer_table import milliseconds
from benchmarks.soak import growth

_SHOWN = {
    "device_used_bytes": "device memory",
    "trainer.rss_bytes": "trainer",
    "schedulers.rss_bytes": "engine",
}


def _line(result: dict[str, Any]) -> str:
    (run,) = result["runs"]
    found = run["samples"]["growth"]
    grown = growth.problems(found)
    changes = [
        f"{words} {(found[name]['late'] - found[name]['early']) / 2**20:+.1f} MiB"
        for name, words in _SHOWN.items()
        if name in found
    ]
    verdict = f"**{'; '.join(grown)}**" if grown else "nothing grows"
    return (
        f"- `{result['case']}`: {run['settings']['syncs']} syncs in a row of {run['bytes'] / 1e9:.2f} GB, median "
        f"{milliseconds(run['stages']['phase'])}: {verdict} (early to late: {', '.join(changes)})."
    )


def render(results: list[dict[str, Any]]) -> list[str]:
    """A line per result; none without results."""
    return ["", *(_line(result) for result in results)] if results else []
