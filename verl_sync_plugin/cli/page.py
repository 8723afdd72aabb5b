# SPDX-License-Identifier: Apache-2.0
"""Makes the page: one HTML file, drawn by matplotlib, that needs no script and no network."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from verl_sync_plugin.cli.runs import Report, Run, Sync, phase_seconds, reporter_of
from verl_sync_plugin.report import PHASE_STAGES

GIB = 2**30
AMOUNT = EngFormatter("B", places=2)  # of bytes that travelled: 15.23 GB
COLUMNS = 120  # bars of a chart at most; of more syncs a bar is the mean of several
MOMENTS = ("asleep", "weights", "synced", "room", "awake")  # of device memory, in the order of a sync
USED = "device_used_bytes"
COLOURS = ("#7a67c7", "#b9b2dd", "#2f7fc9", "#e0702c", "#93683a", "#d3b45c", "#9aa3ad", "#1f9484")
STAGE_COLOURS = dict(zip(PHASE_STAGES, COLOURS, strict=True))
STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px; font: 15px/1.5 system-ui, sans-serif; color: #1c2024; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 28px 0 4px; }
p { margin: 0 0 8px; color: #5f6873; max-width: 80ch; overflow-wrap: anywhere; }
.good { color: #1a7f4b; font-weight: 600; } .bad { color: #b3261e; font-weight: 600; }
svg { width: 100%; height: auto; } div { overflow-x: auto; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid #e2e5e9; font-weight: 400; }
th:first-child { text-align: left; padding-left: 0; } thead th { color: #5f6873; }
"""


def page_of(run: Run, name: str, against: Run | None = None) -> str:
    """The page of a run as HTML; the median of ``against`` stands next to the run's."""
    first = "It plans, records how the engine loads, compiles copy kernels and proves the result."
    parts = [_head(run, name), _section("first", "The first sync", first, _inside(run.syncs[0].slowest))]
    parts += [_later(run.syncs[1:])] if run.syncs[1:] else []
    parts += [_against(run, against)] if against is not None else []
    parts += [_memory(run), _numbers(run), _reporters(run), _all(run)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: weight syncs</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def seconds(value: float) -> str:
    """A time for people: 7.73 s, 0.19 s, 26 ms, 31 µs."""
    return f"{value:.2f} s" if value >= 0.1 else EngFormatter("s", places=0)(value)


def _head(run: Run, name: str) -> str:
    last, later = run.syncs[-1].slowest, run.syncs[1:]
    devices = sorted({report["origin"].get("device", "?") for sync in run.syncs for report in sync.reports})
    day = ""
    if last["spans"] and last["origin"]:
        day = f"{datetime.fromtimestamp(last['origin']['epoch'] + last['spans'][0][1], timezone.utc):, %Y-%m-%d}"
    what = (
        f"{last['manager'] or 'verl-sync-plugin'} on {' and '.join(devices)}{day}: {len(run.syncs)} syncs, steps "
        f"{run.syncs[0].step} to {run.syncs[-1].step}, {last['tensors']} tensors, {AMOUNT(last['nbytes'])} in each."
    )
    missing = [sync.step for sync in run.syncs if any(report["coverage_missing"] for report in sync.reports)]
    good, text = "good", "Every sync wrote every parameter of the engine whole."
    if missing:
        good, text = "bad", f"{len(missing)} syncs, from step {missing[0]} on, left parameters unwritten."
    times = f"The first phase took {seconds(run.syncs[0].seconds)}"
    if later:
        slowest = max(later, key=lambda sync: sync.seconds)
        times += f", the later ones {seconds(statistics.median(sync.seconds for sync in later))} in the median"
        times += f" and {seconds(slowest.seconds)} at most (step {slowest.step})"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "unknown"
    where = f"Versions: {versions}. Run {run.number} of {run.runs} in {', '.join(map(str, run.files))}."
    where += f" Left out, for they are no JSON: {', '.join(run.unread)}." if run.unread else ""
    verdict = f'<p id="verdict"><span class="{good}">{text}</span> {times}.</p>'
    return f"<h1>{escape(name)}</h1><p>{escape(what)}</p>{verdict}<p>{escape(where)}</p>"


def _later(later: Sequence[Sync]) -> str:
    """All later syncs by stage, the slowest of every bar, and when the stages of a typical one ran."""
    size = -(-len(later) // COLUMNS)
    groups = [later[start : start + size] for start in range(0, len(later), size)]
    figure, axes = _axes(3.2)
    bottom = [0.0] * len(groups)
    for stage in _used(later):
        means = [statistics.fmean(_stage(sync, stage) for sync in group) for group in groups]
        axes.bar(range(len(groups)), means, bottom=bottom, label=stage, color=STAGE_COLOURS[stage])
        bottom = [a + b for a, b in zip(bottom, means, strict=True)]
    if size > 1:
        slowest = [max(sync.seconds for sync in group) for group in groups]
        axes.plot(range(len(groups)), slowest, "k.", markersize=3, label="slowest of a bar")
    every = -(-len(groups) // 10)
    axes.set_xticks(range(0, len(groups), every), [str(group[0].step) for group in groups[::every]])
    axes.set_xlabel("training step")
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    median = statistics.median(sync.seconds for sync in later)
    typical = min(later, key=lambda sync: abs(sync.seconds - median))
    text = "Seconds of the whole phase, which the training step waits for; of several engines the slowest."
    text += f" A bar is the mean of {size} syncs." if size > 1 else ""
    inside = f"<p>The stages of step {typical.step}, whose phase is nearest to the median:</p>"
    return _section("later", "Later syncs", text, _svg(figure, axes) + inside + _inside(typical.slowest))


def _inside(report: Report) -> str:
    """When the stages of one sync ran on the reporting rank; ``engine_load`` is the engine rank's."""
    spans = sorted(report["spans"], key=lambda span: (span[1], -span[2]))
    if not spans:  # of a version that did not keep them
        rows = ((stage, seconds(value)) for stage, value in report["stages"].items())
        return _table(f"stages-of-{report['global_steps']}", ("stage", "seconds"), rows)
    totals = {stage: sum(length for name, _, length in spans if name == stage) for stage, _, _ in spans}
    figure, axes = _axes(0.5 + 0.24 * len(totals))
    for row, lane in enumerate(totals):
        own = [(start - spans[0][1], length) for stage, start, length in spans if stage == lane]
        axes.broken_barh(own, (row - 0.4, 0.8), color=STAGE_COLOURS.get(lane, "#444b53"))
    axes.set_yticks(range(len(totals)), [f"{lane}  {seconds(total)}" for lane, total in totals.items()])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value))
    return _svg(figure, axes)


def _against(run: Run, other: Run) -> str:
    both = [each.syncs[1:] or each.syncs for each in (run, other)]
    rows = [
        (stage, *(seconds(statistics.median(_stage(sync, stage) for sync in syncs)) for syncs in both))
        for stage in _used(both[0] + both[1])
    ]
    rows.append(("phase", *(seconds(statistics.median(sync.seconds for sync in syncs)) for syncs in both)))
    text = f"Medians of the syncs after the first; the other run is {', '.join(map(str, other.files))}."
    return _section("against", "Two runs", text, _table("medians", ("", "this run", "the other"), rows))


def _memory(run: Run) -> str:
    """Device memory at the moments of the first and the last sync, all processes together."""
    rows = [(title, when, report) for title, report in _ends(run) for when in MOMENTS if when in report[USED]]
    if not rows:
        return _section("memory", "Memory", "No readings: the run had no GPU.", "")
    figure, axes = _axes(0.6 + 0.26 * len(rows))
    trainer = [report["trainer_reserved_bytes"].get(moment, 0) / GIB for _, moment, report in rows]
    used = [report[USED][moment] / GIB for _, moment, report in rows]
    axes.barh(range(len(rows)), used, label="engine and others", color=COLOURS[3])
    axes.barh(range(len(rows)), trainer, label="trainer's allocator", color=COLOURS[2])
    axes.axvline(max(report["device_total_bytes"] for _, _, report in rows) / GIB, color="k", lw=1, label="the device")
    axes.set_yticks(range(len(rows)), [f"{title}, {moment}" for title, moment, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB in use of the reporting rank's GPU")
    return _section("memory", "Memory", "All processes together, at the moments of a sync.", _svg(figure, axes))


def _numbers(run: Run) -> str:
    kinds = {
        "tensors sent": "tensors",
        "tensors with equal hashes": "hashed_tensors",
        "tensors compared in the engine": "verified_tensors",
        "tensors not comparable there": "not_comparable",
        "engine parameters": "coverage_expected",
        "engine parameters not written whole": "coverage_missing",
        "bytes sent": "nbytes",
        "read on the engine rank's own GPU": "own_bytes",
        "read from other ranks": "peer_bytes",
        "of these in place": "direct_bytes",
        "staging memory held": "staging_bytes",
        "most device memory that the sync took": "peak_device_bytes",
        "growth of the trainer's peak on the host": "peak_host_bytes",
        "delivery": "delivery",
    }
    ends = _ends(run)
    rows = [
        (label, *(AMOUNT(report[key]) if "bytes" in key else str(report[key]) for _, report in ends))
        for label, key in kinds.items()
    ]
    table = _table("ends", ("", *(title for title, _ in ends)), rows)
    return _section("numbers", "Proofs and bytes", "A sync in which hashes or parameters differ fails the run.", table)


def _reporters(run: Run) -> str:
    found: dict[str, list[float]] = {}
    for report in (report for sync in run.syncs for report in sync.reports):
        found.setdefault(reporter_of(report), []).append(phase_seconds(report))
    rows = [
        (who, str(len(times)), seconds(times[0]), seconds(statistics.median(times[1:] or times)))
        for who, times in found.items()
    ]
    table = _table("reporter-numbers", ("rank", "syncs", "first phase", "median later"), rows)
    return _section("reporters", "Who reported", "The leader of every engine, and a separate trainer's rank 0.", table)


def _all(run: Run) -> str:
    stages = _used(run.syncs)
    rows = ((str(sync.step), seconds(sync.seconds), *(seconds(_stage(sync, e)) for e in stages)) for sync in run.syncs)
    return f"<details><summary>All syncs</summary>{_table('syncs', ('step', 'phase', *stages), rows)}</details>"


def _stage(sync: Sync, stage: str) -> float:
    return float(sync.slowest["stages"].get(stage, 0.0))


def _used(syncs: Sequence[Sync]) -> list[str]:
    return [stage for stage in PHASE_STAGES if any(_stage(sync, stage) for sync in syncs)]


def _ends(run: Run) -> list[tuple[str, Report]]:
    return [("first sync", run.syncs[0].slowest), ("last sync", run.syncs[-1].slowest)][: len(run.syncs)]


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    """The figure as inline SVG, without the metadata that names places in the network."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _section(name: str, title: str, text: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2><p>{escape(text)}</p>{body}</section>'


def _table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first cell of a row is its heading."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<div><table id="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
