# SPDX-License-Identifier: Apache-2.0
"""The page: one self-contained HTML file about the syncs of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from verl_sync_plugin.report.sync_report import PHASE_STAGES
from verl_sync_plugin.timeline import figures
from verl_sync_plugin.timeline.charts import UNTOLD, gibibytes, gigabytes, seconds, table
from verl_sync_plugin.timeline.memory import bytes_section, memory_section
from verl_sync_plugin.timeline.read import Run, Sync, phase_seconds
from verl_sync_plugin.timeline.stages import first_section, later_section
from verl_sync_plugin.timeline.style import STYLE

TABLE_ROWS = 200  # syncs in the table at the end, the first and the last ones


def page_of(run: Run, name: str) -> str:
    """The whole page.

    Args:
        run: what is shown.
        name: what the run is called.
    """
    first, later = run.syncs[0], run.syncs[1:]
    parts = [_head(run, name), _tiles(first, later), first_section(first)]
    if later:
        parts.append(later_section(later))
    parts += [memory_section(run), bytes_section(run), _proofs(run), _reporters(run), _all(run), _made_from(run)]
    body = "".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: weight syncs</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(run: Run, name: str) -> str:
    report = run.syncs[-1].slowest
    steps = f"{len(run.syncs)} syncs, steps {run.syncs[0].step} to {run.syncs[-1].step}"
    what = f"{report['tensors']} tensors, {gigabytes(report['nbytes'])} in {report['buckets']} buckets of at most "
    how = f", delivery {report['delivery']}" if report["delivery"] else ""
    bucket = gibibytes(report["bucket_bytes"])
    return (
        f"<header><h1>{escape(name)}</h1><p>verl-sync-plugin moved the weights: {steps}. In the last one {what}{bucket}"
        f"{escape(how)}, by {escape(report['manager'] or 'an unnamed sharding manager')}.</p></header>"
    )


def _tiles(first: Sync, later: Sequence[Sync]) -> str:
    last = (later or [first])[-1].slowest
    missing = last["coverage_missing"]
    tiles = [("first-phase", seconds(phase_seconds(first.slowest)), "first sync, which plans and checks")]
    if later:
        tiles.append(("median-phase", seconds(figures.median_phase(later)), f"median of the {len(later)} later ones"))
        slowest = max(later, key=lambda sync: phase_seconds(sync.slowest))
        told = f"slowest later one, step {slowest.step}"
        tiles.append(("slowest-phase", seconds(phase_seconds(slowest.slowest)), told))
    tiles.append(("moved", gigabytes(last["nbytes"]), "moved in every sync"))
    shown = "".join(
        f'<div><b id="{key}">{escape(value)}</b><span>{escape(what)}</span></div>' for key, value, what in tiles
    )
    covered = f"{last['coverage_expected'] - missing} of {last['coverage_expected']}"
    colour = "bad" if missing else "good"
    proof = f'<div><b id="covered" class="{colour}">{covered}</b><span>engine parameters written whole</span></div>'
    return f'<div class="tiles">{shown}{proof}</div>'


def _proofs(run: Run) -> str:
    missing = [sync.step for sync in run.syncs if any(report["coverage_missing"] for report in sync.reports)]
    if not missing:
        said = '<b class="good">Every sync wrote every parameter of the engine whole.</b>'
    else:
        said = (
            f'<b class="bad">In {len(missing)} syncs, from step {missing[0]} on, the engine has parameters that the '
            "sync does not write.</b> They keep what the engine loaded at its start; its log names them."
        )
    hashed = [sync for sync in run.syncs if all(report["hashed_tensors"] for report in sync.reports)]
    text = f"Hashes of all tensors were compared, and equal, in {len(hashed)} of {len(run.syncs)} syncs."
    if all("hashed_tensors" in report["untold"] for sync in run.syncs for report in sync.reports):
        text = "These reports, of an older version, do not say whether hashes were compared."
    last = "A sync whose hashes differ fails the run, so it is not in a report file."
    keys = (
        *("coverage_expected", "coverage_missing", "hashed_tensors"),
        *("verified_tensors", "not_comparable", "tensors"),
    )
    rows = [
        (label, *(UNTOLD if key in report["untold"] else str(report[key]) for key in keys))
        for label, report in figures.examples(run)
    ]
    head = (
        *("", "engine parameters", "not written whole", "tensors with equal hashes"),
        *("tensors compared in the engine", "not comparable there", "tensors sent"),
    )
    numbers = table(head, rows, "proof-numbers")
    return f'<section id="proofs"><h2>Proofs</h2><p>{said}</p><p>{text} {last}</p>{numbers}</section>'


def _reporters(run: Run) -> str:
    own = figures.reporters(run)
    rows = [
        (
            each.name,
            each.device or UNTOLD,
            str(len(each.reports)),
            seconds(phase_seconds(each.reports[0])),
            seconds(statistics.median(phase_seconds(report) for report in each.reports[1:] or each.reports)),
            gigabytes(each.reports[-1]["own_bytes"] + each.reports[-1]["peer_bytes"]),
        )
        for each in own
    ]
    head = ("rank", "device", "syncs", "first phase", "median later", "read by its engine rank, last")
    text = "The leader of every engine reports; with a separate rollout the trainer's first rank does too."
    return (
        f'<section id="reporters"><h2>Who reported</h2><p>{text}</p>{table(head, rows, "reporter-numbers")}</section>'
    )


def _all(run: Run) -> str:
    half = TABLE_ROWS // 2
    shown = run.syncs if len(run.syncs) <= TABLE_ROWS else [*run.syncs[:half], *run.syncs[-half:]]
    used = [stage for stage in PHASE_STAGES if any(sync.slowest["stages"].get(stage) for sync in shown)]
    rows = [
        (
            str(sync.step),
            seconds(phase_seconds(sync.slowest)),
            *(seconds(sync.slowest["stages"].get(stage, 0.0)) for stage in used),
            gigabytes(sync.slowest["nbytes"]),
            sync.slowest["delivery"],
        )
        for sync in shown
    ]
    what = "All syncs" if len(shown) == len(run.syncs) else f"The first and the last {half} of {len(run.syncs)} syncs"
    listed = table(("step", "phase", *used, "sent", "delivery"), rows, "syncs")
    return f"<section><details><summary>{what}, as a table</summary>{listed}</details></section>"


def _made_from(run: Run) -> str:
    files = ", ".join(str(file) for file in run.files)
    several = f" Run {run.number} of {run.runs} in it." if run.runs > 1 else ""
    unread = f" Lines that are no JSON and were left out: {', '.join(run.unread)}." if run.unread else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "not told by the report file"
    text = f"Versions: {versions}. Made from {files} by verl-sync report.{several}{unread}"
    return f'<section id="made-from"><h2>Conditions</h2><p>{escape(text)}</p></section>'
