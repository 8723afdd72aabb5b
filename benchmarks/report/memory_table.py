# SPDX-License-Identifier: Apache-2.0
"""Of every way the highest share of the memory that survived, and what ended the shares above it."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.memory import search

HEAD = ("case", "way", "highest share that survived", "KV tokens", "phase", "died above it")


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # Ray's, of a line's origin


def _cell(text: str) -> str:
    """A reason as it was recorded; of a warning, that it is one."""
    shown = _COLOUR.sub("", text).replace("|", "\\|").replace("<", "&lt;")
    return f"{shown} (a warning; what raised was not recorded)" if search.is_warning(text) else shown


def _row(result: dict[str, Any], way: str) -> list[str]:
    attempts = [attempt for attempt in result["attempts"] if attempt["way"] == way]
    survived = [attempt for attempt in attempts if attempt["survived"]]
    runs = [run for run in result["runs"] if run["settings"]["way"] == way]
    died = [f"{attempt['share']}: {_cell(attempt['reason'])}" for attempt in attempts if not attempt["survived"]]
    return [
        f"`{result['case']}`",
        way,
        str(max(attempt["share"] for attempt in survived)) if survived else "none of those tried",
        str(survived[-1]["kv_tokens"] or "–") if survived else "–",
        f"{runs[-1]['stages']['phase']:.2f} s" if runs else "–",
        "; ".join(died) or "nothing above it was tried",
    ]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; nothing without results."""
    if not results:
        return []
    rows = []
    for result in results:
        rows += [_row(result, way) for way in dict.fromkeys(attempt["way"] for attempt in result["attempts"])]
    title = "At the limit of the memory, `gpu_memory_utilization` from the highest on until a training survives:"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
