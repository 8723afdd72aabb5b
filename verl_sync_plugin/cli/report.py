# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: a page about the syncs of a run, and a trace of one of them, from its report file.

The trace is in Chrome's format, for chrome://tracing and https://ui.perfetto.dev. Every span is drawn where it was
measured. What a report knows only the length of (``sleep``, which precedes the training step) stands in ``otherData``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.runs import Run, Sync, read_run, reporter_of
from verl_sync_plugin.report import PHASE_STAGES

PAGE = "sync-report.html"
TRAINER, ENGINE = 1, 2  # threads of a reporter's process in the trace
ENGINE_STAGES = ("engine_load",)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help="a page (HTML) about the syncs of a run, made from its report file"
    )
    parser.add_argument("source", metavar="RUN", type=Path, help="the report file, or the folder that holds it")
    parser.add_argument("--out", type=Path, help=f"where the page goes; {PAGE} next to the report file by default")
    parser.add_argument("--run", type=int, dest="number", help="which run of the file, from 1 on; the last by default")
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with: its last, if several")
    parser.add_argument("--trace", type=Path, help="also write a trace of one sync, for https://ui.perfetto.dev")
    parser.add_argument("--step", type=int, help="of which step the trace is; the last by default")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and the trace; the result is the exit code.

    Raises:
        ValueError: the report file or an option cannot be used, or matplotlib is missing; names it and the remedy.
    """
    if arguments.step is not None and arguments.trace is None:
        raise ValueError("--step says of which sync the trace is; say where that goes with --trace OUT.json")
    source: Path = arguments.source
    found = read_run(source, arguments.number)
    against = None if arguments.against is None else read_run(arguments.against)
    if arguments.trace is not None:
        sync = sync_of_step(found, arguments.step)
        _write(arguments.trace, json.dumps(trace_of(sync, found.versions)))
        print(f"{arguments.trace}: the sync of step {sync.step}; open it in https://ui.perfetto.dev")
    try:
        from verl_sync_plugin.cli.page import page_of
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: the page is drawn by matplotlib; pip install matplotlib") from error

    whole = source.resolve()
    page = arguments.out or (source if source.is_dir() else source.parent) / PAGE
    _write(page, page_of(found, whole.name if source.is_dir() else f"{whole.parent.name}/{whole.name}", against))
    of = f", run {found.number} of {found.runs}" if found.runs > 1 else ""
    print(f"{page}: {len(found.syncs)} syncs{of}")
    if found.unread:
        print(f"left out, for they are no JSON: {', '.join(found.unread)}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}; name another place") from error


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
