# SPDX-License-Identifier: Apache-2.0
"""Renders ``benchmarks/results/*.json`` as Markdown tables, between the marks of ``docs/results.md``.

``python -m benchmarks.report`` rewrites that page, ``--check`` fails when it is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory, soak
from benchmarks.common import STAGES, VARIANTS, floor_of, problems_of

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Result = dict[str, Any]


def load(folder: Path) -> list[Result]:
    """The results in ``folder``, by file name.

    Raises:
        ValueError: a file does not have the form.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if problems := problems_of(result):
            raise ValueError(f"{path.name}: " + "; ".join(problems))
        results.append(result)
    return results


def harness(result: Result) -> str:
    """The benchmark that made a result."""
    if "attempts" in result:  # it may have no run
        return "memory"
    (name,) = {str(run["settings"].get("harness", "phase")) for run in result["runs"]}
    return name


def table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> list[str]:
    """The lines of a table; none without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return []
    head_lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return ["", *([title, ""] if title else []), *head_lines, *lines]


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"


def gibibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f} GiB"


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is known; ``None`` where nothing is."""
    known = [value for value in values if value]
    return statistics.median(known) if known else None


def phase_rows(results: list[Result]) -> Iterable[list[str]]:
    """A row for each variant: median seconds of repeated runs, largest peaks."""
    for result in results:
        stock, lowest = None, floor_of(result)
        for variant in VARIANTS:
            runs = [run for run in result["runs"] if run["variant"] == variant]
            if not runs:
                continue
            stages = {name: statistics.median(run["stages"][name] for run in runs) for name in STAGES}
            phase = stages["phase"]
            stock = phase if variant == "stock" else stock
            devices = [run["peak_device_bytes"] for run in runs if run["peak_device_bytes"] is not None]
            cells = [seconds(stages[name]) for name in STAGES]
            yield [
                result["case"],
                f"{variant} (cut short)" if any(run["settings"].get("exit_status") for run in runs) else variant,
                *cells[:-1],
                f"**{cells[-1]}**",
                f"{stock / phase:.1f}×" if stock and variant != "stock" else "",
                milliseconds(lowest),
                f"{phase / lowest:.0f}" if lowest else "–",
                gibibytes(max(devices) if devices else None),
                gibibytes(max(run["peak_host_bytes"] for run in runs)),
            ]


def separate_rows(results: list[Result]) -> Iterable[list[str]]:
    """A row for each variant, of the syncs that have nothing left to set up: all but the first two."""
    for result in results:
        for run in sorted(result["runs"], key=lambda run: VARIANTS.index(run["variant"])):
            syncs = run["samples"]["syncs"][1:]
            if not run["settings"].get("rollout_gpus") or not syncs:
                continue
            load = median(sync["report"].get("stage/engine_load") for sync in syncs)
            yield [
                result["case"],
                run["variant"],
                milliseconds(median(sync["outer"]["call"] for sync in syncs)),
                milliseconds(median(sync["stages"]["update_weights"] for sync in syncs)),
                milliseconds(median(sync["outer"].get("paused") for sync in syncs)),
                milliseconds(load),
                link_share(result, run, load),
                str(len(syncs)),
            ]


def link_share(result: Result, run: dict[str, Any], load: float | None) -> str:
    """How fast the bytes of a run came, and how much that is of what the link was measured to carry."""
    if not load or not run["bytes"]:
        return "–"
    rate, carried = run["bytes"] / load, result["machine"].get("link_bytes_per_second")
    return f"{rate / 1e9:.0f} GB/s" + (f", {rate / carried:.0%} of {carried / 1e9:.0f}" if carried else "")


def by_bucket(result: Result, variant: str, staged: bool = False, verify: str = "first") -> dict[int, float]:
    """Seconds of the transfer by bucket size in MiB."""
    found = {}
    for run in sorted(result["runs"], key=lambda run: int(run["settings"]["bucket_mb"])):
        settings = run["settings"]
        did = (settings.get("staged", False), settings.get("verify") or "first")
        checked = variant == "stock" or (settings.get("hashed", True) and settings.get("check_finite", True))
        if checked and (run["variant"], *did) == (variant, staged, verify):
            found[int(settings["bucket_mb"])] = float(run["stages"]["phase"])
    return found


NOTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("staged in every sync", {"staged": True}),
    ("never compared in the engine", {"verify": "never"}),
    ("compared in the engine in every sync", {"verify": "always"}),
)


def shown_buckets(result: Result) -> list[int]:
    """The smallest and the largest bucket size that can be compared; of all sizes where none can be."""
    stock, plugin = by_bucket(result, "stock"), by_bucket(result, "plugin")
    sizes = sorted(stock.keys() & plugin.keys() or stock.keys() | plugin.keys())
    return sorted({*sizes[:1], *sizes[-1:]})


def transfer_rows(results: list[Result]) -> Iterable[list[str]]:
    for result in results:
        stock, plugin, lowest = by_bucket(result, "stock"), by_bucket(result, "plugin"), floor_of(result)
        for size in shown_buckets(result):
            slow, fast = stock.get(size), plugin.get(size)
            yield [
                result["case"],
                f"{size} MiB",
                milliseconds(slow) if slow else "",
                f"**{milliseconds(fast)}**" if fast else "",
                f"{slow / fast:.1f}×" if slow and fast else "",
                milliseconds(lowest) if lowest else "",
                f"{fast / lowest:.1f}" if fast and lowest else "",
            ]


def transfer_note(result: Result) -> str:
    run = result["runs"][0]
    text = f"- `{result['case']}`: {run['settings']['tensors']} tensors, {run['bytes'] / 1e9:.2f} GB of bf16"
    for what, how in NOTED:
        found = by_bucket(result, "plugin", **how)
        shown = [f"{milliseconds(found[size])} ({size} MiB)" for size in shown_buckets(result) if size in found]
        text += f"; {what} {', '.join(shown)}" if shown else ""
    firsts = {run["variant"]: run["samples"]["first_syncs"][0]["seconds"] for run in reversed(result["runs"])}
    if {"plugin", "stock"} <= firsts.keys():
        text += f"; the first sync {firsts['plugin']:.2f} s, stock's {firsts['stock']:.2f} s"
    return f"{text}."


def memory_rows(results: list[Result]) -> Iterable[list[str]]:
    """For every way the highest share of the memory that survived, and what ended the shares above it."""
    for result in results:
        for way in dict.fromkeys(attempt["way"] for attempt in result["attempts"]):
            attempts = [attempt for attempt in result["attempts"] if attempt["way"] == way]
            survived = [attempt for attempt in attempts if attempt["survived"]]
            runs = [run for run in result["runs"] if run["settings"]["way"] == way]
            died = [f"{each['share']}: {_reason(each['reason'])}" for each in attempts if not each["survived"]]
            yield [
                f"`{result['case']}`",
                way,
                str(max(attempt["share"] for attempt in survived)) if survived else "none of those tried",
                str(survived[-1]["kv_tokens"] or "–") if survived else "–",
                f"{runs[-1]['stages']['phase']:.2f} s" if runs else "–",
                "; ".join(died) or "nothing above it was tried",
            ]


def _reason(text: str) -> str:
    """A reason as it was recorded, without Ray's colours; of a warning, that it is one."""
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("|", "\\|").replace("<", "&lt;")
    return f"{shown} (a warning; what raised was not recorded)" if memory.is_warning(text) else shown


def pauses_rows(results: list[Result]) -> Iterable[list[str]]:
    for result in results:
        for run in result["runs"]:
            samples, settings, ours = run["samples"]["syncs"], run["settings"], run["variant"] == "plugin"
            paused = [float(sample["seconds"]) for sample in samples]
            yield [
                f"`{result['case']}`",
                "ours" if ours else "verl's",
                f"`{settings['way']}`" if ours else "–",
                str(settings["requests"]),
                milliseconds(statistics.median(paused)),
                f"{milliseconds(min(paused))} to {milliseconds(max(paused))}",
                milliseconds(median(sample["gap"] for sample in samples)),
                str(len(samples)),
            ]


def soak_line(result: Result) -> str:
    (run,) = result["runs"]
    found, nbytes = run["samples"]["growth"], run["bytes"]
    parts = {"device_used_bytes": "device memory", "trainer.rss_bytes": "trainer", "schedulers.rss_bytes": "engine"}
    parts["rollout.rss_bytes"] = "rollout rank"
    changes = [
        f"{words} {(found[name]['late'] - found[name]['early']) / 2**20:+.1f} MiB"
        for name, words in parts.items()
        if name in found
    ]
    grown = soak.grown(found)
    size = f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
    return (
        f"- `{result['case']}`: {run['settings']['syncs']} syncs in a row of {size}, median "
        f"{milliseconds(run['stages']['phase'])}: {'**' + '; '.join(grown) + '**' if grown else 'nothing grows'} "
        f"(early to late: {', '.join(changes)})."
    )


def where_lines(results: list[Result]) -> list[str]:
    """One line per machine and stack, with the commit and day of every case measured there."""
    cases: dict[str, list[str]] = {}
    for result in results:
        machine, versions = result["machine"], result["versions"]
        device = f"{machine.get('gpus')} × {machine['gpu']}" if machine["gpu"] else f"CPU ({machine.get('cpu')})"
        known = [f"{name} {versions[name]}" for name in ("verl", "sglang", "torch") if name in versions]
        named = f"`{result['case']}` ({result['commit'][:7]}, {result['date']})"
        cases.setdefault(", ".join([device, *known]), []).append(named)
    return ["", *(f"- {stack}: {', '.join(named)}." for stack, named in cases.items())]


def render(results: list[Result]) -> str:
    """The Markdown of all results."""
    of: dict[str, list[Result]] = {name: [] for name in ("phase", "transfer", "soak", "memory", "pauses")}
    for result in results:
        of[harness(result)].append(result)
    stages = [name.replace("_", " ") for name in STAGES[:-1]]
    phase_head = ["case", "variant", *stages, "**phase**", "speed-up", "floor", "× floor", "peak device", "peak host"]
    lines = [
        *table(phase_head, phase_rows(of["phase"])),
        *table(
            ("case", "variant", "whole", "ranks", "paused", "engine load", "of the link", "syncs"),
            separate_rows(of["phase"]),
            "Separate rollouts, medians without the first two syncs:",
        ),
        *table(
            ("case", "bucket", "stock", "**plugin**", "speed-up", "floor", "× floor"),
            transfer_rows(of["transfer"]),
            "The transfer alone:",
        ),
        "",
        *map(transfer_note, of["transfer"]),
        *table(
            ("case", "server", "`custom.sync.pause`", "requests", "paused", "shortest to longest", "gap", "syncs"),
            pauses_rows(of["pauses"]),
            "An engine with requests in flight, paused for a sync that loads nothing to speak of; the gap is the "
            "longest time between two tokens of a request that stays in the engine:",
        ),
        *table(
            ("case", "way", "highest share that survived", "KV tokens", "phase", "died above it"),
            memory_rows(of["memory"]),
            "At the limit of the memory, `gpu_memory_utilization` from the highest on until a training survives:",
        ),
        "",
        *map(soak_line, of["soak"]),
        *where_lines(results),
    ]
    return "\n".join(lines).strip() if results else "No results yet."


def main(argv: list[str] | None = None) -> int:
    """Rewrites or checks the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is stale")
    args = parser.parse_args(argv)
    text = args.page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    fresh = f"{head}{BEGIN}\n{render(load(args.results))}\n{END}{tail}"
    if args.check and fresh != text:
        print(f"{args.page} is stale: run python -m benchmarks.report", file=sys.stderr)
        return 1
    args.page.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
