# SPDX-License-Identifier: Apache-2.0
"""Renders ``benchmarks/results/*.json`` as Markdown tables, between the marks of ``docs/results.md`` and of the README.

``python -m benchmarks.report`` rewrites these pages and the README's chart; ``--check`` fails when a page is stale, and
both where the README's table is of more than one commit.
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
from benchmarks.common import STAGES, VARIANTS, floor_seconds, problems_of

BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"  # of a part that is written here
# The README's table and chart: cases of one commit, in their order, and what they are called there
HEADLINE = {
    "headline-7b-fsdp2": "7.6 B, FSDP2 on 2 GPUs → TP2",
    "headline-moe-8b-fsdp2": "MoE 8.3 B, FSDP2 on 2 GPUs → TP2",
    "headline-7b-bridge": "7.6 B, Megatron-Bridge TP2 → TP2",
    "headline-mla-7b-bridge": "MoE 7.2 B, latent attention, EP2 → TP2",
    "headline-7b-fsdp2-lora32": "7.6 B, FSDP2, LoRA merged → TP2",
    "separate-headline-7b-fsdp2": "7.6 B, FSDP2 on 1 GPU → 1 GPU of its own",
}
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


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"


def gibibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f} GiB"


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is known; ``None`` where nothing is."""
    known = [value for value in values if value]
    return statistics.median(known) if known else None


def counted(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The syncs that a run's medians are of; results of earlier harnesses count the second one, too."""
    syncs: list[dict[str, Any]] = run["samples"]["syncs"]
    return syncs[1:] or syncs if run["settings"].get("counted_from") else syncs


def phases(result: Result) -> dict[str, float]:
    """Median seconds of a phase by variant."""
    found = {run["variant"]: run["stages"]["phase"] for run in result["runs"]}
    return {variant: found[variant] for variant in VARIANTS if variant in found}


def phase_rows(results: list[Result]) -> Iterable[list[str]]:
    """A row for each variant: medians, largest peaks."""
    for result in results:
        found = phases(result)
        for run in sorted(result["runs"], key=lambda run: VARIANTS.index(run["variant"])):
            variant, samples, phase = run["variant"], run["samples"], run["stages"]["phase"]
            every = [sync["stages"]["phase"] for sync in counted(run)]
            steps = median(samples.get("verl_step_s", [])[1:])
            host = max(samples.get("host_used_bytes", [0])) - run["settings"].get("host_before_bytes", 0)
            yield [
                result["case"],
                f"{variant} (cut short)" if run["settings"].get("exit_status") else variant,
                *[seconds(run["stages"][name]) for name in STAGES[:-1]],
                f"**{seconds(phase)}**",
                f"{seconds(min(every))} to {seconds(max(every))}, n={len(every)}",
                ", ".join(
                    f"{found[other] / phase:.1f}× {other}" for other in list(found)[: list(found).index(variant)]
                ),
                ", ".join(seconds(sync["stages"]["phase"]) for sync in (samples["first_sync"], samples["syncs"][0])),
                f"{phase / steps:.1%}" if steps else "–",
                gibibytes(run["peak_device_bytes"]),
                gibibytes(host if host > 0 else None),
            ]


def commits_of(result: Result) -> list[str]:
    """The commits of a result's runs, which may be of several visits; its own where no run survived."""
    runs = [run["settings"].get("commit", result["commit"]) for run in result["runs"]]
    return list(dict.fromkeys(runs or [result["commit"]]))


def headline(results: list[Result]) -> list[Result]:
    """The results of the README's table and chart, in its order.

    Raises:
        ValueError: they are of several commits.
    """
    of_case = {result["case"]: result for result in results}
    found = [of_case[case] for case in HEADLINE if case in of_case]
    if len(commits := {commit for result in found for commit in commits_of(result)}) > 1:
        raise ValueError(f"the README's table is of {len(commits)} commits: {', '.join(sorted(commits))}")
    return found


def headline_table(results: list[Result]) -> str:
    """The README's table."""

    def row(result: Result) -> list[str]:
        found = phases(result)
        steps = {run["variant"]: median(run["samples"].get("verl_step_s", [])[1:]) for run in result["runs"]}
        faster = [f"{found[other] / found['plugin']:.1f}×" if other in found else "–" for other in VARIANTS[:-1]]
        *others, ours = (seconds(found.get(variant)) for variant in VARIANTS)
        whole = ", ".join(seconds(steps.get(variant)) for variant in VARIANTS)
        return [HEADLINE[result["case"]], *others, f"**{ours}**", *faster, whole]

    head = ("model, trainer → rollout", *VARIANTS[:-1], "**plugin**", "faster than stock", "than tuned", "whole step")
    return "\n".join(table(head, map(row, headline(results)))).strip()


def draw(results: list[Result], path: Path) -> None:
    """The README's chart: a group of bars for each case, on a logarithmic axis, less than 500 pixels high."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = headline(results)[::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.45 * len(shown)), dpi=80)
    for offset, (variant, colour) in enumerate(zip(VARIANTS[::-1], ("#1f77b4", "#a0a0a0", "#d0d0d0"), strict=True)):
        at = [place + 0.27 * (offset - 1) for place, each in enumerate(shown) if variant in phases(each)]
        values = [found[variant] for each in shown if variant in (found := phases(each))]
        bars = axes.barh(at, values, 0.25, color=colour, label=variant)
        axes.bar_label(bars, [seconds(value) for value in values], padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([], minor=True)
    axes.set_xticks(ticks := [0.1, 0.3, 1, 3, 10], map(str, ticks))
    axes.margins(x=0.12)
    axes.set_yticks(range(len(shown)), [HEADLINE[each["case"]] for each in shown])
    axes.set_xlabel("seconds of a weight update")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, reverse=True)
    figure.tight_layout()
    figure.savefig(path)


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


def by_bucket(result: Result, variant: str, staged: bool = False) -> dict[int, float]:
    """Seconds of the transfer by bucket size in MiB."""
    return {
        int(run["settings"]["bucket_mb"]): float(run["stages"]["phase"])
        for run in result["runs"]
        if (run["variant"], run["settings"].get("staged", False)) == (variant, staged)
    }


def shown_buckets(result: Result) -> list[int]:
    """The smallest and the largest bucket size that can be compared; of all sizes where none can be."""
    stock, plugin = by_bucket(result, "stock"), by_bucket(result, "plugin")
    sizes = sorted(stock.keys() & plugin.keys() or stock.keys() | plugin.keys())
    return sorted({*sizes[:1], *sizes[-1:]})


def transfer_rows(results: list[Result]) -> Iterable[list[str]]:
    for result in results:
        stock, plugin = by_bucket(result, "stock"), by_bucket(result, "plugin")
        lowest = floor_seconds(result["runs"][0]["bytes"])
        for size in shown_buckets(result):
            slow, fast = stock.get(size), plugin.get(size)
            yield [
                result["case"],
                f"{size} MiB",
                milliseconds(slow) if slow else "",
                f"**{milliseconds(fast)}**" if fast else "",
                f"{slow / fast:.1f}×" if slow and fast else "",
                milliseconds(lowest),
                f"{fast / lowest:.1f}" if fast else "",
            ]


def transfer_note(result: Result) -> str:
    run = result["runs"][0]
    text = f"- `{result['case']}`: {run['settings']['tensors']} tensors, {run['bytes'] / 1e9:.2f} GB of bf16"
    found = by_bucket(result, "plugin", staged=True)
    shown = [f"{milliseconds(found[size])} ({size} MiB)" for size in shown_buckets(result) if size in found]
    text += f"; staged in every sync {', '.join(shown)}" if shown else ""
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
        named = f"`{result['case']}` ({', '.join(each[:7] for each in commits_of(result))}, {result['date']})"
        cases.setdefault(", ".join([device, *known]), []).append(named)
    return ["", *(f"- {stack}: {', '.join(named)}." for stack, named in cases.items())]


def render(results: list[Result]) -> str:
    """The Markdown of all results."""
    of: dict[str, list[Result]] = {name: [] for name in ("phase", "transfer", "soak", "memory", "pauses")}
    for result in results:
        of[harness(result)].append(result)
    stages = [name.replace("_", " ") for name in STAGES[:-1]]
    phase_head = ["case", "variant", *stages, "**phase**", "range", "speed-up", "first two", "of a step"]
    phase_head += ["peak device", "host"]
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
    """Rewrites or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is stale")
    args = parser.parse_args(argv)
    results, stale = load(args.results), False
    for page, name, text_of in ((args.page, "benchmarks", render), (args.readme, "headline", headline_table)):
        text = page.read_text(encoding="utf-8")
        head, begin, rest = text.partition(BEGIN.format(name))
        _, end, tail = rest.partition(END.format(name))
        if not begin or not end:
            raise ValueError(f"{page} has no part between {BEGIN.format(name)} and {END.format(name)}")
        fresh = f"{head}{begin}\n{text_of(results)}\n{end}{tail}"
        if not args.check:
            page.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            stale = True
            print(f"{page} is stale: run python -m benchmarks.report", file=sys.stderr)
    if headline(results) and not args.check:
        draw(results, args.page.parent / "phase.svg")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
