# SPDX-License-Identifier: Apache-2.0
"""Reads report files (``report.py``) as runs and syncs, and makes a trace of a sync.

The trace is in Chrome's format, for chrome://tracing and https://ui.perfetto.dev. Every span is drawn where it was
measured. What a report knows only the length of (``sleep``, which precedes the training step) stands in ``otherData``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_sync_plugin.report import EVENT, PHASE_STAGES, REPORT_FILE_VARIABLE, SyncReport

Report = dict[str, Any]  # ``SyncReport.as_dict``, and ``versions``
HOW_TO = (
    f"a run writes one where {REPORT_FILE_VARIABLE} names a file in the environment of its workers, for example by "
    f"+ray_kwargs.ray_init.runtime_env.env_vars.{REPORT_FILE_VARIABLE}=/shared/run/reports.jsonl"
)
_EMPTY = SyncReport().as_dict()
TRAINER, ENGINE = 1, 2  # threads of a reporter's process in the trace
ENGINE_STAGES = ("engine_load",)


@dataclass(frozen=True)
class Sync:
    """One sync of a run.

    Attributes:
        step: verl's weight version; -1 when verl gave none.
        reports: one per reporter: the leader of every engine, and with a separate rollout the trainer's first rank.
    """

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
    """One run of ``runs`` that the files hold; the ``number``-th, from 1 on.

    Attributes:
        syncs: in order; at least one.
        versions: of packages.
        unread: lines that are no JSON, ``file:line``.
    """

    files: list[Path]
    syncs: list[Sync]
    versions: dict[str, str]
    number: int
    runs: int
    unread: list[str]


def phase_seconds(report: Report) -> float:
    return float(sum(report["stages"].get(name, 0.0) for name in PHASE_STAGES))


def reporter_of(report: Report) -> str:
    """Who wrote a report, for people; the same for all lines of files that do not say."""
    origin = report["origin"]
    who = f"rank {origin['rank']} on {origin['host']}" if origin else "one rank"
    return f"{report['manager'] or 'sync'}, {who}"


def read_run(path: Path, number: int | None = None) -> Run:
    """Reads a run from a report file, or from those in a folder; the last, where several wrote it in turn.

    Raises:
        ValueError: there is no such run.
    """
    files = _files(path)
    lines, unread = [], []
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
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; {HOW_TO}")
    named = sorted(file for file in path.rglob("*.jsonl") if file.is_file())
    return [file for file in named if f'"{EVENT}"' in _text(file)]


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
    report = {name: line.get(name, empty) for name, empty in _EMPTY.items()}
    for name, empty in _EMPTY.items():
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
            events.append({**event, "pid": process, "tid": ENGINE if stage in ENGINE_STAGES else TRAINER})
    other = {
        "step": sync.step,
        "sleep_seconds": {reporter_of(report): report["stages"].get("sleep", 0.0) for report in timed},
        "spans_left_out": sum(report["spans_left_out"] for report in timed),
        "versions": versions,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
