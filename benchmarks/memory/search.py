# SPDX-License-Identifier: Apache-2.0
"""Which shares of the memory are still to be tried, and what the log of a try says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# what a try runs: the variant of the phase's harness, and the overrides that the plugin alone knows
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stock": ("stock", ()),
    "plugin-at-once": ("plugin", ("actor_rollout_ref.rollout.multi_stage_wake_up=False",)),
    "plugin-multi-stage": ("plugin", ("actor_rollout_ref.rollout.multi_stage_wake_up=True",)),
}
_TOKENS = re.compile(r"max_total_num_tokens=(\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|Not enough memory|cuMem\w+ failed|CUDA_ERROR", re.IGNORECASE)
# an exception by name, and a warning: NCCL's "WARN", Python's and loggers'
_RAISED = re.compile(r"\b(?:\w+Error|\w+Exception)\b")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning\b")
LONGEST = 400  # characters of an error that are kept


def kv_tokens(log: str) -> int | None:
    """How many tokens SGLang's KV cache holds, the fewest of all servers; None where no server came so far."""
    return min((int(value) for value in _TOKENS.findall(log)), default=None)


def ran_out(log: str) -> bool:
    """Whether a log tells of memory that could not be had."""
    return _OUT_OF_MEMORY.search(log) is not None


def is_warning(line: str) -> bool:
    """Whether a line only warns: what raised stands elsewhere."""
    return _WARNING.search(line) is not None and _RAISED.search(line) is None


def reason(log: str) -> str:
    """The line of a log about memory that could not be had that says most, the first of its kind: an exception, else
    any that is no warning, else a warning. Without one: the log's last line that is not empty."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    about = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    raised = [line for line in about if _RAISED.search(line)]
    plain = [line for line in about if not is_warning(line)]
    return (raised or plain or about or lines[-1:] or ["nothing was logged"])[0][:LONGEST]


def pending(attempts: list[dict[str, Any]], ways: list[str], shares: list[float]) -> Iterator[tuple[str, float]]:
    """What to try next, given all attempts so far: of each way the shares from the highest, until one survives.

    ``attempts`` may grow between two steps. The ways take turns, so that a search that is cut short has some of each.
    """
    while True:
        turn = [
            (way, share)
            for way in ways
            if not any(attempt["way"] == way and attempt["survived"] for attempt in attempts)
            for share in shares
            if not any((attempt["way"], attempt["share"]) == (way, share) for attempt in attempts)
        ]
        if not turn:
            return
        yield max(turn, key=lambda one: (one[1], -ways.index(one[0])))
