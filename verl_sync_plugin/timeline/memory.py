# SPDX-License-Identifier: Apache-2.0
"""The page's sections on bytes: device memory by moment, and what moved by which way."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from verl_sync_plugin.timeline import figures
from verl_sync_plugin.timeline.charts import UNTOLD, bar, gibibytes, gigabytes, legend, stacked_columns, table
from verl_sync_plugin.timeline.read import Report, Run

PARTS = {
    "trainer": "trainer's allocator",
    "staging": "staging",
    "others": "CUDA contexts, other processes",
    "weights": "engine: weights",
    "kv_cache": "engine: KV cache",
}
OTHERS_UNTOLD = "trainer, and others before the engine wakes"
NUMBERS = {
    "staging_bytes": "staging memory held",
    "peak_device_bytes": "most that the sync itself took on the device",
    "released_bytes": "cached memory handed back for the engine",
    "activation_bytes": "engine's activations since the sync before",
    "peak_host_bytes": "growth of the trainer's peak on the host",
}
TRAVELLED = {
    "nbytes": "sent in all",
    "own_bytes": "read on the engine rank's own GPU",
    "peer_bytes": "read from other ranks",
    "gathered_bytes": "gathered between trainer ranks",
    "direct_bytes": "of what was read: in place, nothing staged",
    "replayed_bytes": "of what was sent: replayed by the copy plan",
}


def memory_section(run: Run) -> str:
    """Device memory at each moment of the first and the last sync, and what a sync takes."""
    chosen = figures.examples(run)
    text = "Of the reporting rank's GPU, all processes together, at the moments of a sync."
    drawn = _by_moment([(label, report) for label, report in chosen])
    rows = [(told, *(_said(report, key, gibibytes) for _, report in chosen)) for key, told in NUMBERS.items()]
    head = ("", *(label for label, _ in chosen))
    return f'<section id="memory"><h2>Memory</h2><p>{text}</p>{drawn}{table(head, rows, "memory-numbers")}</section>'


def _by_moment(chosen: Sequence[tuple[str, Report]]) -> str:
    shown = [(label, figures.memory_by_moment(report)) for label, report in chosen]
    sums = [sum(moment.parts.values()) for _, moments in shown for moment in moments]
    if not sums:
        return "<p>No readings: the run had no GPU.</p>"
    total = max(report["device_total_bytes"] for _, report in chosen)
    whole = max(total, *sums)
    knows = any(report["trainer_reserved_bytes"] for _, report in chosen)
    labels = PARTS if knows else {**PARTS, "others": OTHERS_UNTOLD}
    present = {part for _, moments in shown for moment in moments for part, size in moment.parts.items() if size}
    legends = legend({part: label for part, label in labels.items() if part in present})
    rows = "".join(_moments(label, moments, labels, whole) for label, moments in shown)
    return f"{legends}{rows}<p>The full width is {gibibytes(whole)}{', all of the device' if total else ''}.</p>"


def _moments(label: str, moments: Sequence[figures.Moment], labels: dict[str, str], whole: int) -> str:
    rows = ""
    for moment in moments:
        used = gibibytes(sum(moment.parts.values()))
        drawn = bar({part: moment.parts[part] for part in labels}, labels, whole, "bytes", used)
        rows += f"<span>{escape(figures.MOMENTS[moment.name])}</span>{drawn}"
    return f'<h3>{escape(label)}</h3><div class="rows">{rows}</div>'


def bytes_section(run: Run) -> str:
    """What engine ranks read, by way, over steps."""
    first, later = run.syncs[:1], run.syncs[1:]
    shown = [column for part in (first, later) for column in figures.columns(part, figures.bytes_by_way)]
    used = {way: label for way, label in figures.WAYS.items() if any(column.parts[way] > 0 for column in shown)}
    chart = stacked_columns(shown, used, "bytes", gigabytes, "training step") if used else ""
    text = (
        "What the engine rank beside the reporting rank read, hashing included, by where it read it; what trainer "
        "ranks gathered among themselves comes on top."
    )
    chosen = figures.examples(run)
    rows = [(told, *(_said(report, key, gigabytes) for _, report in chosen)) for key, told in TRAVELLED.items()]
    rows.append(("delivery", *(report["delivery"] or UNTOLD for _, report in chosen)))
    numbers = table(("", *(label for label, _ in chosen)), rows, "bytes-numbers")
    return f'<section id="bytes"><h2>Bytes by way</h2><p>{text}</p>{legend(used)}{chart}{numbers}</section>'


def _said(report: Report, key: str, unit: object) -> str:
    assert callable(unit)
    return UNTOLD if key in report["untold"] else str(unit(report[key]))
