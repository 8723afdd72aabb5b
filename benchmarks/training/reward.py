# SPDX-License-Identifier: Apache-2.0
"""A reward that a model of random weights can raise: the share of an answer's characters that are ASCII letters."""

from __future__ import annotations

from typing import Any

LEAST_CHARACTERS = 16  # a shorter answer counts as one of these, so that ending early earns nothing


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Scores an answer from 0 to 1; called by verl by this name."""
    letters = sum(character.isascii() and character.isalpha() for character in solution_str)
    return letters / max(len(solution_str), LEAST_CHARACTERS)
