# SPDX-License-Identifier: Apache-2.0
"""One sync in Chrome's trace event format, for chrome://tracing and https://ui.perfetto.dev: when each stage ran.

Every span is drawn where it was measured. What a report knows only the length of (``sleep``, which precedes the
training step) is no event; it stands in ``otherData``.
"""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.cli.report.runs import Report, ReportFileError, Run, Sync, reporter_of
from verl_sync_plugin.report import PHASE_STAGES

TRAINER, ENGINE = 1, 2  # threads of a reporter's process in the trace
ENGINE_STAGES = ("engine_load",)


def sync_of_step(run: Run, step: int | None) -> Sync:
    """A sync of a run; the last one when no step is given.

    Raises:
        ReportFileError: the run has no sync of that step.
    """
    if step is None:
        return run.syncs[-1]
    for sync in run.syncs:
        if sync.step == step:
            return sync
    steps = [sync.step for sync in run.syncs]
    raise ReportFileError(f"--step {step}: the run has no such sync; there are steps {min(steps)} to {max(steps)}")


def trace_of(sync: Sync, versions: dict[str, str]) -> dict[str, Any]:
    """The sync as a JSON object of Chrome's format; times in microseconds since its first span.

    Raises:
        ReportFileError: no report of the sync says when its stages began.
    """
    timed = [report for report in sync.reports if report["spans"] and report["origin"]]
    if not timed:
        raise ReportFileError(
            f"step {sync.step}: its report does not say when stages began, as reports of older versions; a trace needs "
            "a run of this version"
        )
    zero = min(report["origin"]["epoch"] + start for report in timed for _, start, _ in report["spans"])
    events = [event for process, report in enumerate(timed, 1) for event in _events(report, process, zero)]
    other = {
        "step": sync.step,
        "sleep_seconds": {reporter_of(report): report["stages"].get("sleep", 0.0) for report in timed},
        "spans_left_out": sum(report["spans_left_out"] for report in timed),
        "versions": versions,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(report: Report, process: int, zero: float) -> list[dict[str, Any]]:
    names = [("process_name", TRAINER, reporter_of(report))]
    names += [("thread_name", TRAINER, "trainer rank"), ("thread_name", ENGINE, "engine rank beside it")]
    named = [
        {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}} for kind, thread, text in names
    ]
    return named + [_event(span, process, report["origin"]["epoch"] - zero) for span in report["spans"]]


def _event(span: tuple[str, float, float], process: int, shift: float) -> dict[str, Any]:
    stage, start, seconds = span
    return {
        "name": stage,
        "cat": "phase" if stage in PHASE_STAGES else "detail",
        "ph": "X",
        "ts": round((start + shift) * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "pid": process,
        "tid": ENGINE if stage in ENGINE_STAGES else TRAINER,
    }
