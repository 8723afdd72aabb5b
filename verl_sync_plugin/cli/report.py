# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: reads report files (``verl_sync_plugin/report.py``) as runs and syncs, and makes a page about a
run (``page.py``)."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec

from verl_sync_plugin.cli.page import page_of
from verl_sync_plugin.report import EVENT, PHASE_STAGES, REPORT_FILE_VARIABLE, SyncReport

PAGE = "sync-report.html"
Seconds = Annotated[float, msgspec.Meta(ge=-1, lt=1e11)]  # of which a date can be made
HOW_TO = (
    f"a run writes one where {REPORT_FILE_VARIABLE} names a file in the environment of its workers, for example by "
    f"+ray_kwargs.ray_init.runtime_env.env_vars.{REPORT_FILE_VARIABLE}=/shared/run/reports.jsonl"
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help="a page (HTML) about the syncs of a run, made from its report file"
    )
    parser.add_argument("source", metavar="RUN", type=Path, help="the report file, or the folder that holds it")
    parser.add_argument("--out", type=Path, help=f"where the page goes; {PAGE} next to the report file by default")
    parser.add_argument("--run", type=int, dest="number", help="which run of the file, from 1 on; the last by default")
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with: its last, if several")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and returns the exit code. Raises ValueError, with the remedy, where the report file or an
    option cannot be used, or matplotlib is missing."""
    source: Path = arguments.source
    try:
        found = read_run(source, arguments.number)
        page = arguments.out or (source if source.is_dir() else source.parent) / PAGE
        runs = [found, *([read_run(arguments.against)] if arguments.against else [])]
        page.write_text(page_of(runs), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: the page is drawn by matplotlib; pip install matplotlib") from error
    except OSError as error:
        raise ValueError(f"{error}; name another place") from error
    print(f"{page}: {len(found.syncs)} syncs, {found.source}")
    return 0


class Origin(msgspec.Struct):
    host: str
    pid: int
    rank: int
    device: Annotated[str, msgspec.Meta(min_length=1)]
    epoch: Seconds


class Line(msgspec.Struct):
    """Checks a line of a report file."""

    origin: Origin
    stages: dict[str, Seconds]
    spans: Annotated[list[tuple[str, Seconds, Seconds]], msgspec.Meta(min_length=1)]


@dataclass
class Report(SyncReport):
    """A line of a report file."""

    versions: dict[str, str] = field(default_factory=dict)  # of packages; in a process's first line

    @property
    def reporter(self) -> str:
        return f"{self.manager or 'sync'}, rank {self.origin['rank']} on {self.origin['host']}"

    @property
    def began(self) -> float:
        """Seconds since 1970."""
        return float(self.origin["epoch"] + min(start for _, start, _ in self.spans))


@dataclass
class Sync:
    """One sync. ``step`` is verl's weight version, -1 when verl gave none; ``reports`` has one per reporter: the leader
    of every engine, and with a separate rollout the trainer's first rank."""

    step: int
    reports: list[Report]

    @cached_property
    def slowest(self) -> Report:
        """The report that a training step waited for."""
        return max(self.reports, key=lambda report: report.phase_seconds)

    @cached_property
    def stages(self) -> dict[str, float]:
        """Seconds of the whole phase, and of each of its stages."""
        stages = {stage: self.slowest.stages.get(stage, 0.0) for stage in PHASE_STAGES}
        return {"phase": sum(stages.values()), **stages}

    @property
    def seconds(self) -> float:
        return self.stages["phase"]


class Run(NamedTuple):
    """At least one sync, in order; and in words, which run of which files it is."""

    syncs: list[Sync]
    source: str

    @property
    def reports(self) -> list[Report]:
        return [report for sync in self.syncs for report in sync.reports]

    @property
    def versions(self) -> dict[str, str]:
        return {name: text for report in self.reports for name, text in report.versions.items()}

    @property
    def later(self) -> list[Sync]:
        """The syncs after the first, where there are any."""
        return self.syncs[1:] or self.syncs

    @property
    def slowest(self) -> Sync:
        return max(self.later, key=lambda sync: sync.seconds)

    def median(self, stage: str = "phase") -> float:
        return median(sync.stages[stage] for sync in self.later)


def read_run(path: Path, number: int | None = None) -> Run:
    """Reads a run from a report file, or from those in a folder; the last, where several wrote it in turn."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; {HOW_TO}")
    files, lines, unread = [], [], []
    for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
        texts = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        found = [_line(text, f"{file}:{place}") for place, text in enumerate(texts, 1) if text.strip()]
        if reports := [each for each in found if isinstance(each, Report)]:
            files.append(file)
            lines += reports
            unread += [each for each in found if isinstance(each, str)]
    if not lines:
        raise ValueError(f"{path}: no sync reports in it; {HOW_TO}")
    if len(files) > 1:
        lines.sort(key=lambda report: report.began)
    runs = _split(lines)
    chosen = len(runs) if number is None else number
    if not 1 <= chosen <= len(runs):
        raise ValueError(f"{path}: no run {chosen} in it, it holds {len(runs)}; use --run 1 to {len(runs)}")
    source = f"run {chosen} of {len(runs)} in {', '.join(map(str, files))}"
    return Run(runs[chosen - 1], f"{source}; skipped, not JSON: {', '.join(unread)}" if unread else source)


def _line(text: str, place: str) -> Report | str | None:
    """The report in a line; its place where the line is no JSON, and ``None`` where somebody else wrote it."""
    try:
        line = msgspec.json.decode(text)
    except ValueError:  # NaN, too
        return place
    if not isinstance(line, dict) or line.get("event") != EVENT:
        return None
    try:
        msgspec.convert(line, Line)
        return msgspec.convert(line, Report)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}; remove that line, which is broken or of an old version") from error


def _split(lines: list[Report]) -> list[list[Sync]]:
    """The syncs of each run: several may have written a file in turn. A later one begins at an earlier step."""
    runs: list[dict[tuple[int, int], Sync]] = [{}]
    last: dict[str, tuple[int, int]] = {}  # step and process of each reporter's last report
    seen: Counter[tuple[str, int]] = Counter()
    for report in lines:
        who, step, pid = report.reporter, report.global_steps, report.origin["pid"]
        if who in last and (step < last[who][0] or (step == last[who][0] and pid != last[who][1])):
            runs.append({})
            last.clear()
            seen.clear()
        last[who] = step, pid
        runs[-1].setdefault((step, seen[who, step]), Sync(step, [])).reports.append(report)
        seen[who, step] += 1
    return [list(syncs.values()) for syncs in runs]
