# SPDX-License-Identifier: Apache-2.0
"""The page's sections on seconds: the first sync apart, the later ones over steps, and the inside of one."""

from __future__ import annotations

from collections.abc import Sequence

from verl_sync_plugin.report.sync_report import DETAIL_STAGES, PHASE_STAGES
from verl_sync_plugin.timeline import figures
from verl_sync_plugin.timeline.charts import bar, legend, seconds, stacked_columns, table, waterfall
from verl_sync_plugin.timeline.read import Report, Sync, phase_seconds


def first_section(sync: Sync) -> str:
    """The first sync, with a scale of its own."""
    report = sync.slowest
    parts, whole = stages_of(report), phase_seconds(report)
    labels = {stage: f"{stage} {seconds(value)}" for stage, value in parts.items() if value > 0}
    text = (
        "It plans, has the engine record how its model loads, compiles copy kernels and checks itself, so it takes "
        "longer than all others and has a scale of its own here."
    )
    shown = bar(parts, {stage: stage for stage in parts}, whole, "seconds", seconds(whole))
    inside = f"<h3>Inside</h3>{_inside(report)}"
    return f'<section id="first"><h2>The first sync</h2><p>{text}</p>{shown}{legend(labels)}{inside}</section>'


def later_section(later: Sequence[Sync]) -> str:
    """All other syncs over steps, and one of them as an example."""
    shown = figures.columns(later, stages_of)
    used = {stage: stage for stage in PHASE_STAGES if any(column.parts[stage] > 0 for column in shown)}
    grouped = " Every column is the mean of several syncs." if len(shown) < len(later) else ""
    chart = stacked_columns(shown, used, "seconds", seconds, "training step")
    example = figures.nearest_to_median(later)
    return (
        '<section id="later"><h2>Later syncs</h2><p>Seconds of the whole phase, as the training step waits for it; of '
        f"several engines the slowest.{grouped}</p>{legend(used)}{chart}"
        f"<h3>Inside the sync of step {example.step}, whose phase is nearest to the median</h3>"
        f"{_inside(example.slowest)}</section>"
    )


def stages_of(report: Report) -> dict[str, float]:
    """Seconds of the phase by stage, whose sum it is."""
    return {stage: report["stages"].get(stage, 0.0) for stage in PHASE_STAGES}


def _inside(report: Report) -> str:
    """When the stages of one sync ran, or how long they took where the report does not say when."""
    spans = report["spans"]
    if not spans:
        stages = [(name, seconds(value)) for name, value in report["stages"].items() if name in DETAIL_STAGES]
        note = "<p>This report, of an older version, does not say when each stage ran. Stages overlap.</p>"
        return note + table(("stage", "seconds"), stages, "")
    zero = min(start for _, start, _ in spans)
    shown = [(stage, round(start - zero, 6), length) for stage, start, length in spans]
    lanes = list(dict.fromkeys(stage for stage, _, _ in sorted(shown, key=lambda span: (span[1], -span[2]))))
    whole = max(start + length for _, start, length in shown)
    left = f" {report['spans_left_out']} more spans were not kept." if report["spans_left_out"] else ""
    note = (
        "When each stage ran on the reporting rank, as measured. engine_load is the engine rank beside it; "
        f"update_weights and resume_weights hold others.{left} Sleep comes before the training step and is not drawn."
    )
    return f"<p>{note}</p>{waterfall(shown, lanes, whole)}"
