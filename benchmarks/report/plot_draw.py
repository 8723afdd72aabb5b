# SPDX-License-Identifier: Apache-2.0
"""The drawing itself. Needs matplotlib, which is in requirements/cpu.txt and nothing else here needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours, told apart by everyone
COLOURS = {
    "sleep": "#0072B2",
    "resume_weights": "#56B4E9",
    "resume_kv": "#009E73",
    "update_weights": "#E69F00",
    "rest": "#BBBBBB",
    "stock": "#555555",
    "plugin": "#D55E00",
    "floor": "#CC0000",
}
WORDS = {
    "resume_weights": "resume weights",
    "resume_kv": "resume KV cache",
    "update_weights": "update weights",
    "rest": "rest of the call (offloading, barriers)",
}
ZOOM = 1.25  # the zoomed scale ends this far beyond the plugin's longest bar
ROW = 0.36  # inches
LEGEND = 0.32  # inches below the axes
# Text stays text: a tenth of the size of outlines. The salt makes the same results give the same file.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "verl-sync-plugin", "font.size": 8.5, "font.family": "sans-serif"}
STYLE |= {"font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "axes.spines.top": False, "axes.spines.right": False}


def _seconds(value: float, _: Any = None) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _inches(axes: Axes) -> float:
    return float(axes.bbox.height / matplotlib.rcParams["figure.dpi"])


def _legend(axes: Axes, handles: list[Any], words: list[str]) -> None:
    """One row below the axes."""
    where = (0.0, -LEGEND / _inches(axes))
    axes.legend(handles, words, loc="upper left", bbox_to_anchor=where, ncols=6, frameon=False, columnspacing=1)


def _bars(axes: Axes, cases: list[dict[str, Any]], limit: float | None) -> None:
    """Stacked bars, two per case; a bar beyond the limit is cut and says so."""
    row = 0.0
    ticks, labels = [], []
    for case in cases:
        for variant, parts in case["bars"].items():
            left = 0.0
            for name, seconds in parts.items():
                axes.barh(row, seconds, left=left, height=0.8, color=COLOURS[name], linewidth=0)
                left += seconds
            cut = limit is not None and left > limit
            text = f"→ {_seconds(left)} " if cut else f" {_seconds(left)}"
            where = {"ha": "right", "bbox": {"facecolor": "white", "linewidth": 0, "pad": 1}} if cut else {"ha": "left"}
            axes.text(limit if limit is not None and cut else left, row, text, va="center", **where)
            ticks.append(row)
            labels.append(f"{case['case']}  {variant}" if variant == next(iter(case["bars"])) else variant)
            row += 1
        if case["floor"]:
            axes.vlines(case["floor"], row - len(case["bars"]) - 0.5, row - 0.5, color=COLOURS["floor"], linewidth=1.2)
        row += 0.5
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(row - 0.75, -0.75)
    axes.xaxis.set_major_formatter(FuncFormatter(_seconds))
    longest = max(sum(parts.values()) for case in cases for parts in case["bars"].values())
    axes.set_xlim(0, limit or longest * 1.15)


def _phases(whole: Axes, zoomed: Axes, cases: list[dict[str, Any]]) -> None:
    fast = [sum(case["bars"]["plugin"].values()) for case in cases if "plugin" in case["bars"]]
    _bars(whole, cases, None)
    _bars(zoomed, cases, max(fast) * ZOOM if fast else None)
    zoomed.set_yticks([])
    whole.set_title("Resharding phase by stage", loc="left", fontweight="bold")
    zoomed.set_title("the same, zoomed in", loc="left")
    names = [name for name in COLOURS if name in cases[0]["bars"][next(iter(cases[0]["bars"]))]]
    handles: list[Any] = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    handles.append(pyplot.Line2D([], [], color=COLOURS["floor"]))
    labels = [WORDS.get(name, name) for name in names]
    labels.append("floor: every byte read and written once")
    _legend(whole, handles, labels)


def _transfers(axes: Axes, cases: list[dict[str, Any]]) -> None:
    """A row per case on a logarithmic scale, a mark per bucket size; marks, as a bar has no zero to stand on there."""
    sizes = sorted({size for case in cases for seconds in case["seconds"].values() for size in seconds})
    for row, case in enumerate(cases):
        axes.hlines(row, 1e-9, 1e9, color="#EEEEEE", linewidth=6, zorder=0)
        for variant, seconds in case["seconds"].items():
            for size, value in seconds.items():
                area = 22 + 22 * sizes.index(size)
                axes.scatter(value, row, s=area, color=COLOURS[variant], alpha=0.75, linewidth=0)
            if seconds:
                best = min(seconds.values())
                axes.annotate(_seconds(best), (best, row), (0, 7), textcoords="offset points", ha="center", fontsize=7)
        if case["floor"]:
            axes.vlines(case["floor"], row - 0.4, row + 0.4, color=COLOURS["floor"], linewidth=1.2)
    every = [value for case in cases for seconds in case["seconds"].values() for value in seconds.values()]
    every += [case["floor"] for case in cases if case["floor"]]
    axes.set_xscale("log")
    axes.set_xlim(min(every) / 1.5, max(every) * 1.5)
    axes.set_ylim(len(cases) - 0.4, -0.75)
    axes.set_yticks(range(len(cases)), [case["case"] for case in cases])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(_seconds))
    axes.set_title("Transfer alone, logarithmic", loc="left", fontweight="bold")
    handles = [pyplot.Line2D([], [], color=COLOURS[name], marker="o", linewidth=0) for name in ("stock", "plugin")]
    words = ["stock", f"plugin (larger marks: larger buckets, {', '.join(map(str, sizes))} MiB; the best is labelled)"]
    _legend(axes, handles, words)


def draw(drawn: dict[str, list[dict[str, Any]]], description: str, out: Path) -> None:
    """Writes the picture, with ``description`` in its metadata."""
    phases, transfers = drawn["phase"], drawn["transfer"]
    bars = sum(len(case["bars"]) + 0.5 for case in phases)
    heights = [max(1.0, bars) * ROW, max(1.0, len(transfers)) * ROW * 1.2]
    with pyplot.rc_context(STYLE):
        tall = sum(heights) + 2.0
        figure = pyplot.figure(figsize=(11, tall))
        places = {"top": 1 - 0.4 / tall, "bottom": 0.6 / tall, "hspace": 1.05 / (sum(heights) / 2), "wspace": 0.05}
        grid = figure.add_gridspec(2, 2, height_ratios=heights, **places)
        if phases:
            _phases(figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1]), phases)
        if transfers:
            _transfers(figure.add_subplot(grid[1, :]), transfers)
        metadata = {"Date": None, "Creator": None, "Description": description}
        figure.savefig(out, metadata=metadata, bbox_inches="tight", facecolor="white")
        pyplot.close(figure)
