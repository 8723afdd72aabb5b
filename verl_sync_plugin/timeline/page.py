# SPDX-License-Identifier: Apache-2.0
"""The page: one self-contained HTML file about the syncs of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from verl_sync_plugin.report.sync_report import DETAIL_STAGES, PHASE_STAGES
from verl_sync_plugin.timeline import figures
from verl_sync_plugin.timeline.charts import (
    bar,
    gibibytes,
    gigabytes,
    legend,
    seconds,
    stacked_columns,
    table,
    waterfall,
)
from verl_sync_plugin.timeline.read import Report, Run, Sync, phase_seconds
from verl_sync_plugin.timeline.style import style

MEMORY = {
    "trainer": "trainer's allocator",
    "staging": "staging",
    "before": "other: CUDA contexts, other processes",
    "weights": "engine: weights",
    "kv_cache": "engine: KV cache",
}
BEFORE_OLD = "trainer, and others before the engine wakes"
COLOURS = {
    **{stage: stage for stage in PHASE_STAGES},
    **{stage: "detail" for stage in (*DETAIL_STAGES, "deliver_adapter", "broadcast")},
    "engine_load": "engine",
    **dict(zip(figures.WAYS, ("resume_kv", "resume_weights", "update_weights", "after", "sleep"), strict=True)),
    **dict(zip(MEMORY, ("resume_weights", "after", "barrier", "update_weights", "resume_kv"), strict=True)),
}
TABLE_ROWS = 200  # syncs in the table at the end, the first and the last ones


def page_of(run: Run, name: str) -> str:
    """The whole page.

    Args:
        run: what is shown.
        name: what the run is called.
    """
    first, later = run.syncs[0], run.syncs[1:]
    sections = [_first(first), *([_over_steps(later)] if later else []), _memory(run), _bytes(run), _proofs(run)]
    body = "".join([_head(run, name), _tiles(first, later), *sections, _reporters(run), _all(run), _made_from(run)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: weight syncs</title><style>{style(_colours(run))}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _colours(run: Run) -> dict[str, str]:
    told = {span[0] for sync in run.syncs for report in sync.reports for span in report["spans"]}
    return {**{stage: "detail" for stage in sorted(told)}, **COLOURS}


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


def _stages_of(report: Report) -> dict[str, float]:
    return {stage: report["stages"].get(stage, 0.0) for stage in PHASE_STAGES}


def _first(sync: Sync) -> str:
    report = sync.slowest
    parts, whole = _stages_of(report), phase_seconds(report)
    labels = {stage: f"{stage} {seconds(value)}" for stage, value in parts.items() if value > 0}
    text = (
        "It plans, has the engine record how its model loads, compiles copy kernels and checks itself, so it takes "
        "longer than all others and has a scale of its own here."
    )
    shown = bar(parts, {stage: stage for stage in parts}, whole, "seconds", seconds(whole))
    inside = f"<h3>Inside</h3>{_inside(report)}"
    return f'<section id="first"><h2>The first sync</h2><p>{text}</p>{shown}{legend(labels)}{inside}</section>'


def _inside(report: Report) -> str:
    """When the stages of one sync ran, or how long they took where the report does not say when."""
    spans = report["spans"]
    if not spans:
        stages = [(name, value) for name, value in report["stages"].items() if name in DETAIL_STAGES]
        note = "<p>This report, of an older version, does not say when each stage ran. Stages overlap.</p>"
        return note + table(("stage", "seconds"), [(name, seconds(value)) for name, value in stages], "inside")
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


def _over_steps(later: Sequence[Sync]) -> str:
    shown = figures.columns(later, _stages_of)
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


def _memory(run: Run) -> str:
    chosen = _examples(run)
    shown = [(label, figures.memory_by_moment(sync.slowest), sync.slowest) for label, sync in chosen]
    if not any(moments for _, moments, _ in shown):
        drawn = "<p>No GPU: the run had no device memory.</p>"
    else:
        whole = max(_top(moments, report) for _, moments, report in shown)
        old = not any(report["trainer_reserved_bytes"] for _, _, report in shown)
        labels = {**MEMORY, "before": BEFORE_OLD if old else MEMORY["before"]}
        present = {part for _, moments, _ in shown for moment in moments for part, size in moment.parts.items() if size}
        drawn = legend({part: label for part, label in labels.items() if part in present})
        drawn += "".join(_moments(label, moments, labels, whole) for label, moments, _ in shown)
        total = max(report["device_total_bytes"] for _, _, report in shown)
        drawn += f"<p>The full width is {gibibytes(whole)}{', all of the device' if whole == total else ''}.</p>"
    numbers = [
        ("staging memory held", "staging_bytes"),
        ("most that the sync itself took on the device", "peak_device_bytes"),
        ("cached memory handed back for the engine", "released_bytes"),
        ("engine's activations since the sync before", "activation_bytes"),
        ("growth of the trainer's peak on the host", "peak_host_bytes"),
    ]
    rows = [(text, *(gibibytes(sync.slowest[key]) for _, sync in chosen)) for text, key in numbers]
    head = ("", *(label for label, _ in chosen))
    text = "Of the reporting rank's GPU, all processes together, at the moments of a sync."
    return f'<section id="memory"><h2>Memory</h2><p>{text}</p>{drawn}{table(head, rows, "memory-numbers")}</section>'


def _examples(run: Run) -> list[tuple[str, Sync]]:
    chosen = [("first sync", run.syncs[0])]
    return chosen + ([(f"last sync, step {run.syncs[-1].step}", run.syncs[-1])] if len(run.syncs) > 1 else [])


def _top(moments: Sequence[figures.Moment], report: Report) -> int:
    return max(report["device_total_bytes"], max((sum(moment.parts.values()) for moment in moments), default=0))


def _moments(label: str, moments: Sequence[figures.Moment], labels: dict[str, str], whole: int) -> str:
    rows = ""
    for moment in moments:
        used = gibibytes(sum(moment.parts.values()))
        drawn = bar({part: moment.parts[part] for part in labels}, labels, whole, "bytes", used)
        rows += f"<span>{escape(figures.MOMENTS[moment.name])}</span>{drawn}"
    return f'<h3>{escape(label)}</h3><div class="rows" data-sync="{escape(label)}">{rows}</div>' if rows else ""


def _bytes(run: Run) -> str:
    shown = figures.columns(run.syncs, figures.bytes_by_way)
    used = {way: label for way, label in figures.WAYS.items() if any(column.parts[way] > 0 for column in shown)}
    chart = stacked_columns(shown, used, "bytes", gigabytes, "training step") if used else ""
    text = (
        "What the engine rank beside the reporting rank read, hashing included, by where it read it; what trainer ranks "
        "gathered among themselves comes on top."
    )
    return f'<section id="bytes"><h2>Bytes by way</h2><p>{text}</p>{legend(used)}{chart}{_ways(run)}</section>'


def _ways(run: Run) -> str:
    numbers = [
        ("sent in all", "nbytes"),
        ("read from the trainer rank on the same GPU", "own_bytes"),
        ("read from other ranks", "peer_bytes"),
        ("gathered between trainer ranks", "gathered_bytes"),
        ("of what was read: in place, nothing staged", "direct_bytes"),
        ("of what was sent: replayed by the copy plan", "replayed_bytes"),
    ]
    chosen = _examples(run)
    rows = [(text, *(gigabytes(sync.slowest[key]) for _, sync in chosen)) for text, key in numbers]
    rows.append(("delivery", *(sync.slowest["delivery"] or "not told" for _, sync in chosen)))
    return table(("", *(label for label, _ in chosen)), rows, "bytes-numbers")


def _proofs(run: Run) -> str:
    missing = [sync.step for sync in run.syncs if any(report["coverage_missing"] for report in sync.reports)]
    if not missing:
        said = '<b class="good">Every sync wrote every parameter of the engine whole.</b>'
    else:
        said = (
            f'<b class="bad">In {len(missing)} syncs, from step {missing[0]} on, the engine has parameters that the sync '
            "does not write.</b> They keep what the engine loaded at its start; its log names them."
        )
    hashed = [sync for sync in run.syncs if all(report["hashed_tensors"] for report in sync.reports)]
    told = any(report["origin"] for sync in run.syncs for report in sync.reports)
    text = f"Hashes of all tensors were compared, and equal, in {len(hashed)} of {len(run.syncs)} syncs."
    if not told:
        text = "These reports, of an older version, do not say whether hashes were compared."
    last = "A sync whose hashes differ fails the run, so it is not in a report file."
    rows = [
        (
            str(label),
            str(r["coverage_expected"]),
            str(r["coverage_missing"]),
            str(r["hashed_tensors"]),
            str(r["tensors"]),
        )
        for label, r in ((label, sync.slowest) for label, sync in _examples(run))
    ]
    head = ("", "engine parameters", "not written whole", "tensors with equal hashes", "tensors sent")
    return f'<section id="proofs"><h2>Proofs</h2><p>{said}</p><p>{text} {last}</p>{table(head, rows, "proof-numbers")}</section>'


def _reporters(run: Run) -> str:
    own = figures.reporters(run)
    rows = [
        (
            each.name,
            each.device or "not told",
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
