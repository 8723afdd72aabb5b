# SPDX-License-Identifier: Apache-2.0
"""What the trainings of stock verl and of the plugin reached: a row per run."""

from __future__ import annotations

import statistics
from typing import Any

HEAD = (
    "case", "run", "steps", "reward, first 5 steps", "reward, last 5 steps", "probability difference, median",
    "gradient norm, median", "update weights, median", "step, median", "step 1: reward", "gradient norm",
    "tokens of an answer", "probability difference",
)  # fmt: skip
ENDS = 5


def _median(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.median(float(step[name]) for step in steps)


def _row(result: dict[str, Any], run: dict[str, Any]) -> list[str]:
    steps = run["samples"]["syncs"]
    rewards = [float(step["reward"]) for step in steps]
    return [
        f"`{result['case']}`",
        f"{run['variant']} {run['settings']['repeat'] + 1}",
        str(len(steps)),
        f"{statistics.mean(rewards[:ENDS]):.3f}",
        f"{statistics.mean(rewards[-ENDS:]):.3f}",
        f"{_median(steps, 'probability_difference'):.1e}",
        f"{_median(steps, 'grad_norm'):.3g}",
        f"{_median(steps[1:], 'update_weights'):.3f} s",
        f"{_median(steps[1:], 'step'):.2f} s",
        # sampled with the weights that every run begins with
        f"{rewards[0]:.3f}",
        f"{float(steps[0]['grad_norm']):.3g}",
        f"{float(steps[0]['response_length']):.1f}",
        f"{float(steps[0]['probability_difference']):.1e}",
    ]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; nothing without results."""
    if not results:
        return []
    title = (
        "GRPO of a model of random weights, seed and data the same in every run. Sampling repeats itself in none, so"
        " runs of stock verl differ among themselves as well ([every step](../benchmarks/results/training.svg)); in"
        " `training-greedy-…` nothing is drawn, and a prompt has one answer:"
    )
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    rows = [_row(result, run) for result in results for run in result["runs"]]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
