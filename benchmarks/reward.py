# SPDX-License-Identifier: Apache-2.0
"""The reward of the benchmark runs: deterministic, and it varies with the answer, so that weights change every step."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Scores an answer by its number of distinct characters; called by verl by this name."""
    return float(len(set(solution_str)) % 7) / 7.0
