# SPDX-License-Identifier: Apache-2.0
"""What the soak runs say, in one line each, and what the processes of the long ones held at some of their syncs."""

from __future__ import annotations

from typing import Any

from benchmarks.report.transfer_table import milliseconds
from benchmarks.soak import growth

_SHOWN = {
    "device_used_bytes": "device memory",
    "trainer.rss_bytes": "trainer",
    "schedulers.rss_bytes": "engine",
    "rollout.rss_bytes": "rollout rank",
}
MARKS = (1, 100, 500, 1000)
_PROCESSES = {"trainer": "trainer", "schedulers": "engine", "rollout": "rollout rank"}


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"


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
        f"- `{result['case']}`: {run['settings']['syncs']} syncs in a row of {_size(run['bytes'])}, median "
        f"{milliseconds(run['stages']['phase'])}: {verdict} (early to late: {', '.join(changes)})."
    )


def _rows(result: dict[str, Any]) -> list[str]:
    """One per kind of process: what it held after some syncs; none of a run that has no samples of them."""
    (run,) = result["runs"]
    at = {sample["sync"]: sample for sample in run["samples"]["syncs"]}
    if not at.keys() >= set(MARKS):
        return []
    rows = []
    for kind, words in _PROCESSES.items():
        held = [at[mark][kind] for mark in MARKS if kind in at[mark]]
        if held:
            sizes = [[f"{each[name] / 2**20:.1f}" for each in held] for name in ("rss_bytes", "shared_bytes")]
            counts = [[str(each[name]) for each in held] for name in ("fds", "threads")]
            cells = [" / ".join(values) for values in (*sizes, *counts)]
            rows.append(f"| `{result['case']}` | {words} | " + " | ".join(cells) + " |")
    shm = " / ".join(f"{at[mark]['dev_shm_bytes'] / 2**20:.1f}" for mark in MARKS)
    return [*rows, f"| `{result['case']}` | all of `/dev/shm` | | {shm} | | |"]


def _table(results: list[dict[str, Any]]) -> list[str]:
    rows = [row for result in results for row in _rows(result)]
    if not rows:
        return []
    marks = ", ".join(str(mark) for mark in MARKS[:-1]) + f" and {MARKS[-1]}"
    head = ("case", "process", "resident, MiB", "shared memory mapped, MiB", "open files", "threads")
    title = f"What the processes held after sync {marks}; `/dev/shm` is the whole machine's:"
    return ["", title, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows]


def render(results: list[dict[str, Any]]) -> list[str]:
    """A line per result, and a table of the long ones; nothing without results."""
    return ["", *(_line(result) for result in results), *_table(results)] if results else []
