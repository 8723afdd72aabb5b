# SPDX-License-Identifier: Apache-2.0
"""The table of the transfer alone: a row per case and bucket size, with peers where any were measured. The plugin's own
profile stays in the results."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import floor
from benchmarks.report import peers, separate_table

DEFAULT_VERIFY = "first"
NOTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("without hashes", {"hashed": False}),
    ("staged in every sync", {"hashed": True, "staged": True}),
    ("never compared in the engine", {"hashed": True, "verify": "never"}),
    ("nor looked for NaN and Inf", {"hashed": True, "verify": "never", "finite": False}),
    ("compared in the engine in every sync", {"hashed": True, "verify": "always"}),
)
HEAD = ("case", "bucket", "stock", "**plugin**", "speed-up", *peers.HEAD, "floor", "× floor")


def harness(result: dict[str, Any]) -> str:
    """What measured a result: one of ``table.HARNESSES``."""
    if "attempts" in result:  # it may have no run
        return "memory"
    (name,) = {str(run["settings"].get("harness", "phase")) for run in result["runs"]}
    return name


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def seconds_by_bucket(
    result: dict[str, Any], variant: str, hashed: bool, staged: bool = False, verify: str = "", finite: bool = True
) -> dict[int, float]:
    """Seconds of the transfer by bucket size in MiB; where no ``verify`` is named, of the default, or of the first."""
    found: dict[int, float] = {}
    for run in sorted(result["runs"], key=lambda run: int(run["settings"]["bucket_mb"])):
        settings = run["settings"]
        did = (settings["hashed"], settings.get("staged", False), settings.get("check_finite", True))
        alike = (run["variant"], *did) == (variant, hashed, staged, finite)
        said, size = settings.get("verify", ""), settings["bucket_mb"]
        if alike and (said == verify or (not verify and (size not in found or said == DEFAULT_VERIFY))):
            found[size] = run["stages"]["phase"]
    return found


def shown_buckets(result: dict[str, Any]) -> list[int]:
    """The smallest and the largest bucket size that can be compared; of all sizes where none can be."""
    stock = seconds_by_bucket(result, "stock", hashed=False)
    plugin = seconds_by_bucket(result, "plugin", hashed=True)
    sizes = sorted(stock.keys() & plugin.keys() or stock.keys() | plugin.keys())
    return sorted({*sizes[:1], *sizes[-1:]})


def _rows(result: dict[str, Any], elsewhere: tuple[str, float] | None) -> list[list[str]]:
    stock = seconds_by_bucket(result, "stock", hashed=False)
    plugin = seconds_by_bucket(result, "plugin", hashed=True)
    lowest = floor.of_result(result)
    rows = []
    for size in shown_buckets(result):
        slow, fast = stock.get(size), plugin.get(size)
        rows.append(
            [
                result["case"],
                f"{size} MiB",
                milliseconds(slow) if slow else (f"{milliseconds(elsewhere[1])} (another visit)" if elsewhere else ""),
                f"**{milliseconds(fast)}**" if fast else "",
                f"{slow / fast:.1f}×" if slow and fast else "",
                *peers.cells(result, fast, milliseconds),
                milliseconds(lowest) if lowest else "",
                f"{fast / lowest:.1f}" if fast and lowest else "",
            ]
        )
    return rows


def _note(result: dict[str, Any], elsewhere: tuple[str, float] | None) -> str:
    run = result["runs"][0]
    text = f"- `{result['case']}`: {run['settings']['tensors']} tensors, {run['bytes'] / 1e9:.2f} GB of bf16"
    for what, how in NOTED:
        found = seconds_by_bucket(result, "plugin", **how)
        shown = [f"{milliseconds(found[size])} ({size} MiB)" for size in shown_buckets(result) if size in found]
        text += f"; {what} {', '.join(shown)}" if shown else ""
    firsts = {run["variant"]: run["samples"]["first_syncs"][0]["seconds"] for run in reversed(result["runs"])}
    if {"plugin", "stock"} <= firsts.keys():
        text += f"; the first sync {firsts['plugin']:.2f} s, stock's {firsts['stock']:.2f} s"
    text += _engine_load(result)
    text += peers.note(result, milliseconds)
    if elsewhere is not None:
        text += f"; stock was not measured beside it, its {milliseconds(elsewhere[1])} are those of `{elsewhere[0]}`"
    return f"{text}."


def _engine_load(result: dict[str, Any]) -> str:
    """Of a separate trainer: how fast the engine rank read the link; empty where the result does not tell both."""
    runs = [run for run in result["runs"] if run["variant"] == "plugin"]
    told = [sync["report"] for run in runs for sync in run["samples"].get("syncs", [])]
    stages = [report.get("rollout_stages", {}) for report in told]
    loads = [each["engine_load"] for each in stages if "engine_load" in each]
    if not loads or not result["machine"].get("link_bytes_per_second"):
        return ""
    load = statistics.median(loads)
    if told[0].get("delivery") == "broadcast":
        return f"; the engine rank copies what has arrived on its own GPU for {milliseconds(load)}"
    share = separate_table.link_share(result, runs[0], load)
    return f"; the engine rank reads and writes for {milliseconds(load)}: {share}"


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; none without results."""
    if not results:
        return []
    other = {result["case"]: peers.stock_elsewhere(result, results) for result in results}
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(row) + " |" for result in results for row in _rows(result, other[result["case"]])]
    return ["", *lines, "", *(_note(result, other[result["case"]]) for result in results)]
