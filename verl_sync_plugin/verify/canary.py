# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of fixed prompts, from two sides: how far apart they are. Knows neither trainer nor engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PROMPTS = 4
PROMPT_TOKENS = 16
RESPONSE_TOKENS = 4
SEED = 7
LogProbs = Sequence[Sequence[float]]  # by prompt and token


@dataclass(frozen=True)
class Scored:
    """What an engine says of prompts and of its own greedy responses to them.

    Attributes:
        prompts: log-probability of every token of each prompt but its first.
        decoded: of each response token, as the engine decoded it.
        rescored: of the same tokens, read by the engine as parts of a longer prompt.
    """

    prompts: LogProbs
    decoded: LogProbs
    rescored: LogProbs


@dataclass(frozen=True)
class Apart:
    """How far two sides are from each other, in nats.

    Attributes:
        mean: of the absolute differences of all tokens.
        worst: their mean over the tokens of one prompt, where it is largest.
        prompt: the number of that prompt, from 0.
        largest: of the absolute differences.
        count: of tokens.
    """

    mean: float
    worst: float
    prompt: int
    largest: float
    count: int


def canary_prompts(vocabulary: int, prompts: int = PROMPTS, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random token ids, the same in every run. Of the lower half of a vocabulary, since tokens that stand for images
    and the like are at its end.

    Args:
        vocabulary: how many tokens the model knows.
        prompts: how many.
        tokens: of each.
    """
    generator = torch.Generator().manual_seed(SEED)
    drawn: list[list[int]] = torch.randint(0, max(1, vocabulary // 2), (prompts, tokens), generator=generator).tolist()
    return drawn


def apart(one: LogProbs, other: LogProbs) -> Apart:
    """How far two sides are apart. What is no number counts as infinitely far.

    Raises:
        ValueError: they are not of the same tokens.
    """
    if [len(each) for each in one] != [len(each) for each in other] or not all(map(len, one)):
        raise ValueError(f"log-probabilities of {_counts(one)} and of {_counts(other)} tokens cannot be compared")
    by_prompt = [[_distance(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(one, other, strict=True)]
    means = [sum(distances) / len(distances) for distances in by_prompt]
    everything = [distance for distances in by_prompt for distance in distances]
    worst = max(means)
    return Apart(sum(everything) / len(everything), worst, means.index(worst), max(everything), len(everything))


def _distance(one: float, other: float) -> float:
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance


def _counts(log_probs: LogProbs) -> list[int]:
    return [len(each) for each in log_probs]
