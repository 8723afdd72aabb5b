# SPDX-License-Identifier: Apache-2.0
"""Reads report files (``report.py``) as runs and syncs, and makes a trace of a sync, or a page about a run.

The page is one HTML file that needs no script and no network; matplotlib is imported only where it draws. The trace is
in Chrome's format, for chrome://tracing and https://ui.perfetto.dev: every span is drawn where it was measured, and
what a report knows only the length of (``sleep``, which precedes the training step) stands in ``otherData``.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_sync_plugin.report import EVENT, PHASE_STAGES, REPORT_FILE_VARIABLE, SyncReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = dict[str, Any]  # ``SyncReport.as_dict``, and ``versions``
HOW_TO = (
    f"a run writes one where {REPORT_FILE_VARIABLE} names a file in the environment of its workers, for example by "
    f"+ray_kwargs.ray_init.runtime_env.env_vars.{REPORT_FILE_VARIABLE}=/shared/run/reports.jsonl"
)
TRAINER, ENGINE = 1, 2  # threads of a reporter's process in the trace
GIB = 2**30
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


@dataclass(frozen=True)
class Sync:
    """One sync. ``step`` is verl's weight version, -1 when verl gave none; ``reports`` has one per reporter: the leader
    of every engine, and with a separate rollout the trainer's first rank."""

    step: int
    reports: list[Report]

    @property
    def slowest(self) -> Report:
        """The report that a training step waited for."""
        return max(self.reports, key=phase_seconds)

    @property
    def seconds(self) -> float:
        return phase_seconds(self.slowest)


@dataclass(frozen=True)
class Run:
    """The ``number``-th, from 1 on, of ``runs`` that the files hold: at least one sync, in order, and the versions of
    packages. ``unread`` are lines that are no JSON, as ``file:line``."""

    files: list[Path]
    syncs: list[Sync]
    versions: dict[str, str]
    number: int
    runs: int
    unread: list[str]


def phase_seconds(report: Report) -> float:
    return float(sum(report["stages"].get(name, 0.0) for name in PHASE_STAGES))


def reporter_of(report: Report) -> str:
    """Names the writer of a report; the same for all lines of files that do not say."""
    origin = report["origin"]
    who = f"rank {origin['rank']} on {origin['host']}" if origin else "one rank"
    return f"{report['manager'] or 'sync'}, {who}"


def read_run(path: Path, number: int | None = None) -> Run:
    """Reads a run from a report file, or from those in a folder; the last, where several wrote it in turn."""
    files, lines, unread = _files(path), [], []
    for file in files:
        found, broken = _lines(file)
        lines += found
        unread += broken
    if not lines:
        raise ValueError(f"{path}: no sync reports in it; {HOW_TO}")
    if len(files) > 1:  # in the order of their syncs
        if not all(report["spans"] and report["origin"] for report in lines):
            raise ValueError(f"{path}: several report files that do not say when syncs began; name one of them")
        lines.sort(key=lambda report: float(report["origin"]["epoch"] + report["spans"][0][1]))
    runs = _split(lines)
    chosen = len(runs) if number is None else number
    if not 1 <= chosen <= len(runs):
        raise ValueError(f"{path}: no run {chosen} in it, it holds {len(runs)}; use --run 1 to {len(runs)}")
    own = runs[chosen - 1]
    versions = {name: text for report in own for name, text in report["versions"].items()}
    return Run(files, _syncs(own), versions, chosen, len(runs), unread)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path}: no such file or folder; {HOW_TO}")
        return [path]
    return [file for file in sorted(path.rglob("*.jsonl")) if file.is_file() and f'"{EVENT}"' in _text(file)]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}; give a file that you may read") from error


def _lines(file: Path) -> tuple[list[Report], list[str]]:
    """The reports of a file, and the places of lines that are no JSON: a run that was killed may leave one."""
    found: list[Report] = []
    broken: list[str] = []
    for position, text in enumerate(_text(file).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            broken.append(f"{file.name}:{position}")
            continue
        if isinstance(line, dict) and line.get("event") == EVENT:
            found.append(_report(line, f"{file}:{position}"))
    return found, broken


def _report(line: dict[str, Any], place: str) -> Report:
    """A report with every field: those that its version did not write are empty."""
    fields = SyncReport().as_dict()
    report = {name: line.get(name, empty) for name, empty in fields.items()}
    for name, empty in fields.items():
        if not isinstance(report[name], (int, float) if isinstance(empty, float) else type(empty)):
            raise ValueError(f"{place}: {name} is {report[name]!r}, no {type(empty).__name__}; remove that line")
    return {**report, "versions": line.get("versions") or {}}


def _split(lines: list[Report]) -> list[list[Report]]:
    """One list per run: several may have written a file in turn. A later one begins at an earlier step."""
    runs: list[list[Report]] = [[]]
    last: dict[str, tuple[int, int]] = {}  # step and process of each reporter's last report
    for report in lines:
        who, step, pid = reporter_of(report), report["global_steps"], report["origin"].get("pid", 0)
        if who in last and (step < last[who][0] or (step == last[who][0] and pid != last[who][1])):
            runs.append([])
            last.clear()
        last[who] = step, pid
        runs[-1].append(report)
    return runs


def _syncs(lines: list[Report]) -> list[Sync]:
    """Groups the reports of one sync. Files that do not name the reporter hold one report per engine and step."""
    seen: Counter[tuple[str, int]] = Counter()
    syncs: dict[tuple[int, int], Sync] = {}
    for report in lines:
        step = report["global_steps"]
        key = (reporter_of(report), step)
        nth = seen[key] if report["origin"] or step < 0 else 0
        seen[key] += 1
        syncs.setdefault((step, nth), Sync(step, [])).reports.append(report)
    return list(syncs.values())


def sync_of_step(run: Run, step: int | None) -> Sync:
    """A sync of a run; the last one when no step is given."""
    for sync in reversed(run.syncs):
        if step in (None, sync.step):
            return sync
    steps = [sync.step for sync in run.syncs]
    raise ValueError(f"--step {step}: the run has no such sync; there are steps {min(steps)} to {max(steps)}")


def trace_of(sync: Sync, versions: dict[str, str]) -> dict[str, Any]:
    """The sync as a JSON object of Chrome's format; times in microseconds since its first span."""
    timed = [report for report in sync.reports if report["spans"] and report["origin"]]
    if not timed:
        raise ValueError(
            f"step {sync.step}: its report does not say when stages began, as reports of older versions; a trace needs "
            "a run of this version"
        )
    zero = min(report["origin"]["epoch"] + start for report in timed for _, start, _ in report["spans"])
    events: list[dict[str, Any]] = []
    for process, report in enumerate(timed, 1):
        names = [("process_name", TRAINER, reporter_of(report)), ("thread_name", TRAINER, "trainer rank")]
        for kind, thread, text in (*names, ("thread_name", ENGINE, "its engine rank")):
            events.append({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}})
        for stage, start, seconds in report["spans"]:
            category = "phase" if stage in PHASE_STAGES else "detail"
            begin = round((start + report["origin"]["epoch"] - zero) * 1e6, 3)
            event = {"name": stage, "cat": category, "ph": "X", "ts": begin, "dur": round(seconds * 1e6, 3)}
            events.append({**event, "pid": process, "tid": ENGINE if stage == "engine_load" else TRAINER})
    other = {
        "step": sync.step,
        "sleep_seconds": {reporter_of(report): report["stages"].get("sleep", 0.0) for report in timed},
        "spans_left_out": sum(report["spans_left_out"] for report in timed),
        "versions": versions,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


# ---- the page


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
    return f"{value:.2f} s" if value >= 0.1 else _scaled(value, "s", 0)


def _scaled(value: float, unit: str, places: int) -> str:
    from matplotlib.ticker import EngFormatter

    return str(EngFormatter(unit, places=places)(value))


def _head(run: Run, name: str) -> str:
    last, later = run.syncs[-1].slowest, run.syncs[1:]
    devices = sorted({report["origin"].get("device", "?") for sync in run.syncs for report in sync.reports})
    day = ""
    if last["spans"] and last["origin"]:
        day = f"{datetime.fromtimestamp(last['origin']['epoch'] + last['spans'][0][1], UTC):, %Y-%m-%d}"
    what = (
        f"{last['manager'] or 'verl-sync-plugin'} on {' and '.join(devices)}{day}: {len(run.syncs)} syncs, steps "
        f"{run.syncs[0].step} to {run.syncs[-1].step}, {last['tensors']} tensors, "
        f"{_scaled(last['nbytes'], 'B', 2)} in each."
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
    """The times at which the stages of one sync ran on the reporting rank; ``engine_load`` is the engine rank's."""
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
        (label, *(_scaled(report[key], "B", 2) if "bytes" in key else str(report[key]) for _, report in ends))
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    """The figure as inline SVG, without the metadata that names places in the network."""
    import matplotlib

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
