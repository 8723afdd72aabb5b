# SPDX-License-Identifier: Apache-2.0
"""Draws the page of ``verl-sync report``: one HTML file that needs no script and no network. matplotlib is imported
only where it draws."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from statistics import fmean, median
from typing import TYPE_CHECKING

from verl_sync_plugin.report import PHASE_STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from verl_sync_plugin.cli.report import Run, Sync

BARS = 120  # of a chart at most; of more syncs a bar stands for several
OUTLIER = 4  # times the median of the bars: what is slower does not set the height of the chart
_COLOURS = "#7a67c7", "#b9b2dd", "#2f7fc9", "#e0702c", "#93683a", "#d3b45c", "#9aa3ad", "#1f9484"
STAGE_COLOURS = dict(zip(PHASE_STAGES, _COLOURS, strict=True))
FIELDS = (
    "tensors", "hashed_tensors", "verified_tensors", "not_comparable", "coverage_expected", "coverage_missing",
    "nbytes", "staging_bytes", "peak_device_bytes", "peak_host_bytes",
    "delivery",
)  # fmt: skip
STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px; font: 15px/1.5 system-ui, sans-serif; color: #1c2024; }
h1 { font-size: 22px; margin: 8px 0 0; } p { margin: 4px 0 8px; color: #5f6873; overflow-wrap: anywhere; }
p.good { color: #1a7f4b; font-weight: 600; } p.bad { color: #b3261e; font-weight: 600; }
svg { width: 100%; height: auto; } div { overflow-x: auto; margin: 12px 0; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid #e2e5e9; font-weight: 400; }
th:first-child { text-align: left; padding-left: 0; } thead th { color: #5f6873; }
"""


def page_of(runs: Sequence[Run]) -> str:
    """The page of the first run as HTML, next to another, if one is given."""
    head, every = "<p>compared with</p>".join(map(_head, runs)), _syncs(runs[0])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title_of(runs[0]))}</title><style>{STYLE}</style></head><body>{head}{_charts(runs)}"
        f"{_numbers(runs)}<details><summary>All syncs</summary>{every}</details></body></html>\n"
    )


def title_of(run: Run) -> str:
    """Model, trainer → rollout, GPUs and date."""
    of = {key: value for report in run.reports for key, value in report.origin.items() if value}
    pair = f": {of['trainer']} → {of['engine']}" if "trainer" in of and "engine" in of else ""
    day = datetime.fromtimestamp(run.syncs[-1].slowest.began, UTC)
    return f"{of.get('model', 'Weight syncs')}{pair} on {of.get('ranks', '?')} × {of['device']}, {day:%Y-%m-%d}"


def _head(run: Run) -> str:
    """Says what went wrong, or how the syncs were proven, how long they took, and of which file the run is."""

    def steps(name: str) -> list[int]:
        return [sync.step for sync in run.syncs if any(getattr(report, name) for report in sync.reports)]

    total, hashed, verified = len(run.syncs), len(steps("hashed_tensors")), len(steps("verified_tensors"))
    proof = f"{'all' if hashed == total else hashed} hashed, {verified} verified in the engine"
    proof = "all verified" if verified == total else proof
    if wrong := steps("coverage_missing"):
        proof = f"{len(wrong)} from step {wrong[0]} on left parameters of the engine unwritten"
    text = f"{total} syncs, median {seconds(run.median())}, slowest {seconds(run.slowest.seconds)} "
    text += f"(step {run.slowest.step}), first {seconds(run.syncs[0].seconds)}; {proof}."
    last, versions = run.syncs[-1].slowest, ", ".join(f"{name} {version}" for name, version in run.versions.items())
    source = f"{last.manager}: steps {run.syncs[0].step} to {last.global_steps}, {last.tensors} tensors, "
    source += f"{_scaled(last.nbytes, 'B')} in each. Versions: {versions or 'unknown'}. Here: {run.source}."
    verdict = f'<p class="{"bad" if wrong else "good"}">{escape(text)}</p>'
    return f"<h1>{escape(title_of(run))}</h1>{verdict}<p>{escape(source)}</p>"


def seconds(value: float) -> str:
    """A time for people: 7.73 s, 0.19 s, 26 ms, 31 µs."""
    return f"{value:.2f} s" if value >= 0.1 else _scaled(value, "s", 0)


def _scaled(value: float, unit: str, places: int = 2) -> str:
    from matplotlib.ticker import EngFormatter

    return str(EngFormatter(unit, places=places)(value))


def _charts(runs: Sequence[Run]) -> str:
    """All charts as one inline SVG, without the metadata that names places in the network."""
    import matplotlib
    from matplotlib.figure import Figure

    run = runs[0]
    typical = min(run.later, key=lambda sync: abs(sync.seconds - run.median()))
    inside = (run.slowest, "the slowest"), (typical, "nearest to the median"), (run.syncs[0], "the first")
    charts: list[tuple[float, Callable[[Axes], None]]] = [(3.4, partial(_draw_syncs, runs))] if run.syncs[1:] else []
    for sync, which in reversed({id(sync): (sync, which) for sync, which in inside}.values()):
        charts.append((0.8 + 0.22 * len(_lanes(sync)), partial(_draw_stages, sync, which)))
    heights, out = [height for height, _ in charts], io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(10.4, sum(heights)))
        figure.set_layout_engine("constrained", h_pad=0.1)
        every = figure.subplots(len(charts), squeeze=False, height_ratios=heights)
        for axes, (_, draw) in zip(every[:, 0], charts, strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "<svg" + out.getvalue().partition("<svg")[2]


def _draw_syncs(runs: Sequence[Run], axes: Axes) -> None:
    """The later syncs by stage, and the slowest of each bar unless it makes all others flat."""
    from matplotlib.ticker import EngFormatter

    later, slowest = runs[0].later, runs[0].slowest
    size = -(-len(later) // BARS)
    groups = [later[start : start + size] for start in range(0, len(later), size)]
    bars, bottom = range(len(groups)), [0.0] * len(groups)
    worst = [max(sync.seconds for sync in group) for group in groups]
    top = OUTLIER * median(worst)
    if size > 1:
        axes.bar(bars, worst, color="#d9dde2", label="slowest of a bar")
    for stage in _used(later):
        means = [fmean(sync.stages[stage] for sync in group) for group in groups]
        axes.bar(bars, means, bottom=bottom, label=stage, color=STAGE_COLOURS[stage])
        bottom = [a + b for a, b in zip(bottom, means, strict=True)]
    for other in runs[1:]:
        axes.axhline(other.median(), color="k", lw=1, ls="--", label="median of the other run")
    if slow := [bar for bar in bars if worst[bar] > top]:
        axes.set_ylim(0, top)
        axes.plot(slow, [top] * len(slow), "k^", ms=4, clip_on=False)
    at = worst.index(slowest.seconds), min(slowest.seconds, top)
    said = f"{seconds(slowest.seconds)}, step {slowest.step}"
    axes.annotate(said, at, (0, 4), textcoords="offset points", ha="center", annotation_clip=False)
    axes.set_xlim(-0.8, max(len(groups), 12) - 0.2)  # two syncs are not two walls
    every = -(-len(groups) // 10)
    axes.set_xticks(range(0, len(groups), every), [str(group[0].step) for group in groups[::every]])
    axes.set_xlabel("training step")
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    mean = f", each bar the mean of {size}" if size > 1 else ""
    axes.set_title(f"Later syncs: the whole phase, which a training step waits for{mean}", pad=16)


def _draw_stages(sync: Sync, which: str, axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    spans, lanes = sync.slowest.spans, _lanes(sync)
    zero = min(start for _, start, _ in spans)
    for row, lane in enumerate(lanes):
        own = [(start - zero, length) for stage, start, length in spans if stage == lane]
        axes.broken_barh(own, (row - 0.4, 0.8), color=STAGE_COLOURS.get(lane, "#444b53"))
    axes.set_yticks(range(len(lanes)), [f"{lane}  {seconds(total)}" for lane, total in lanes.items()])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    of = "of the reporting rank; engine_load of the engine; sleep came earlier"
    axes.set_title(f"Stages of step {sync.step}, {which}, {of}")


def _lanes(sync: Sync) -> dict[str, float]:
    """Stages in the order in which they began, with their seconds."""
    lanes: dict[str, float] = {}
    for stage, _, length in sorted(sync.slowest.spans, key=lambda span: (span[1], -span[2])):
        lanes[stage] = lanes.get(stage, 0.0) + length
    return lanes


def _numbers(runs: Sequence[Run]) -> str:
    """Medians of the later syncs' seconds, and the other fields of the last sync, next to the first sync."""
    rows: list[tuple[str, ...]] = []
    for stage in ("phase", *_used([sync for run in runs for sync in run.syncs])):
        values = [value for run in runs for value in (run.syncs[0].stages[stage], run.median(stage))]
        rows.append((stage, *map(seconds, values)))
    for name in FIELDS:
        ends = [getattr(run.syncs[place].slowest, name) for run in runs for place in (0, -1)]
        rows.append((name, *(_scaled(value, "B") if "bytes" in name else str(value) for value in ends)))
    medians = "seconds of later syncs are medians, all else is the last's"
    head = (medians, "first sync", "later syncs", "the other's first", "its later ones")
    return _table("numbers", head[: 1 + 2 * len(runs)], rows)


def _syncs(run: Run) -> str:
    stages = ("phase", *_used(run.syncs))
    rows = [(str(s.step), *(seconds(s.stages[stage]) for stage in stages), s.slowest.reporter) for s in run.syncs]
    return _table("syncs", ("step", *stages, "slowest reporter"), rows)


def _used(syncs: Sequence[Sync]) -> list[str]:
    return [stage for stage in PHASE_STAGES if any(sync.stages[stage] for sync in syncs)]


def _table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first cell of a row is its heading."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for heading, *cells in rows:
        body += f"<tr><th>{escape(heading)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    return f'<div><table id="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
