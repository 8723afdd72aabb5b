# SPDX-License-Identifier: Apache-2.0
"""Draws the trainings of ``benchmarks/results/*.json`` step by step, stock against plugin.

``python -m benchmarks.report`` writes ``benchmarks/results/training.svg``, where there is such a result. As with the
other picture, what is drawn is in the digest in its metadata, and the check needs no matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import plot, table, transfer_table

OUT = table.RESULTS / "training.svg"
# the name of a series, what its panel is called, whether its scale is logarithmic
PANELS = (
    ("reward", "reward", False),
    ("probability_difference", "probability difference, rollout to trainer", True),
    ("grad_norm", "gradient norm", True),
    ("update_weights", "update weights, s", True),
)


def data(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Everything that is drawn, by case: a run's variant and its series."""
    drawn: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if transfer_table.harness(result) == "training":
            drawn[result["case"]] = [_run(run) for run in result["runs"]]
    return drawn


def _run(run: dict[str, Any]) -> dict[str, Any]:
    steps = run["samples"]["syncs"]
    series = {name: [step[name] for step in steps] for name, _, _ in PANELS}
    return {"variant": run["variant"], "number": [step["number"] for step in steps], **series}


def draw(drawn: dict[str, list[dict[str, Any]]], description: str, out: Path) -> None:
    """Writes the picture, a row of panels per case, with ``description`` in its metadata."""
    from matplotlib import pyplot

    from benchmarks.report.plot_draw import COLOURS, STYLE

    with pyplot.rc_context(STYLE):
        size = (3.4 * len(PANELS), 2.9 * len(drawn))
        figure, grid = pyplot.subplots(len(drawn), len(PANELS), figsize=size, squeeze=False, layout="constrained")
        for row, (case, runs) in zip(grid, drawn.items(), strict=True):
            for axes, (name, words, logarithmic) in zip(row, PANELS, strict=True):
                for run in runs:
                    axes.plot(run["number"], run[name], color=COLOURS[run["variant"]], linewidth=1.1, alpha=0.85)
                if logarithmic:
                    axes.set_yscale("log")
                axes.set_title(words, loc="left")
                axes.set_xlabel("step")
            row[0].set_ylabel(case)
            kinds = list(dict.fromkeys(run["variant"] for run in runs))
            handles = [pyplot.Line2D([], [], color=COLOURS[kind]) for kind in kinds]
            labels = [f"{kind} ({sum(run['variant'] == kind for run in runs)} runs)" for kind in kinds]
            row[0].legend(handles, labels, frameon=False)
        metadata = {"Date": None, "Creator": None, "Description": description}
        figure.savefig(out, metadata=metadata, facecolor="white")
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Draws or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=table.RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true", help="draw nothing; fail when the picture is out of date")
    args = parser.parse_args(argv)
    drawn = data(table.load(args.results))
    if not drawn:
        return 0
    digest = plot.digest(drawn)
    if not args.check:
        draw(drawn, f"results sha256:{digest}", args.out)
        return 0
    fresh = plot.digest_in(args.out) == digest
    if not fresh:
        print(f"{args.out} is out of date: run python -m benchmarks.report", file=sys.stderr)
    return 0 if fresh else 1
