# SPDX-License-Identifier: Apache-2.0
"""What verl's console says of every training step."""

from __future__ import annotations

import re
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"(?:^|\s)step:(\d+) - (.*)$", re.MULTILINE)
# a value may be printed as a number or as numpy's, np.float64(0.5)
_VALUE = r"(?:np\.\w+\()?(-?(?:[0-9.]+(?:[eE][+-]?\d+)?|nan|inf))"
# our name of a series, verl's name of the metric
METRICS = {
    "reward": "critic/score/mean",
    "probability_difference": "training/rollout_probs_diff_mean",
    "grad_norm": "actor/grad_norm",
    "response_length": "response_length/mean",
    "update_weights": "timing_s/update_weights",
    "step": "timing_s/step",
}


def steps_of(text: str) -> list[dict[str, Any]]:
    """Every step's metrics by the names of ``METRICS``, and its ``number``; one that verl did not print is None.

    Args:
        text: the log of a run.
    """
    found = []
    for number, line in _STEP.findall(_ANSI.sub("", text)):
        values: dict[str, Any] = {"number": int(number)}
        for name, metric in METRICS.items():
            value = re.search(rf"(?:^|\s){re.escape(metric)}:{_VALUE}", line)
            values[name] = float(value.group(1)) if value else None
        found.append(values)
    return found


def problems(steps: list[dict[str, Any]], expected: int) -> list[str]:
    """What a run's steps lack to be compared; empty when nothing."""
    found = [] if len(steps) == expected else [f"{len(steps)} steps instead of {expected}"]
    missing = sorted({name for step in steps for name in METRICS if step[name] is None})
    return found + [f"verl printed no {METRICS[name]}" for name in missing]
