# SPDX-License-Identifier: Apache-2.0
"""Seconds of LoRA rollouts: the adapter merged into the weights against the adapter served by the engine."""

from __future__ import annotations

import json
import statistics
from typing import Any

HEAD = ("cases", "variant", "tokens", "merged", "adapter")
POLL_SECONDS = 2  # verl's replay buffer looks for finished rollouts that often: one has ended up to this much earlier
MERGE_KEY = "lora.merge="
# what may differ between two runs that are compared
_PER_RUN = ("name", "extra", "repeat", "exit_status", "run_seconds", "steps")


def merges(result: dict[str, Any]) -> bool:
    """Whether the case merges; without an override the harness does."""
    words = [word for word in result["runs"][0]["settings"].get("extra", ()) if MERGE_KEY in word]
    return not words or words[-1].lower().endswith("=true")


def _kind(result: dict[str, Any]) -> str:
    """The same for two cases that differ in ``lora.merge`` alone."""
    settings = result["runs"][0]["settings"]
    kept = {name: value for name, value in settings.items() if name not in _PER_RUN}
    other = [word for word in settings.get("extra", ()) if MERGE_KEY not in word]
    return json.dumps([kept, sorted(other)], sort_keys=True)


def rollouts(result: dict[str, Any], variant: str) -> list[dict[str, float]]:
    """All rollouts of all repeats but the first of each run, which is a warm-up."""
    runs = [run for run in result["runs"] if run["variant"] == variant]
    return [rollout for run in runs for rollout in run["samples"].get("rollouts", [])[1:]]


def within(found: list[dict[str, float]]) -> str:
    """The whole seconds between which the median rollout took."""
    most = round(statistics.median(rollout["seconds"] for rollout in found))
    return f"{max(most - POLL_SECONDS, 0)} to {most} s"


def pairs(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(merged, adapter) results that differ in ``lora.merge`` alone."""
    lora = [result for result in results if result["runs"][0]["settings"].get("lora_rank")]
    merged = {_kind(result): result for result in lora if merges(result)}
    return [(merged[_kind(result)], result) for result in lora if not merges(result) and _kind(result) in merged]


def render(results: list[dict[str, Any]]) -> list[str]:
    """The lines of the table; none where no pair was measured."""
    rows = []
    for one, other in pairs(results):
        for variant in ("stock", "plugin"):
            merged, adapter = rollouts(one, variant), rollouts(other, variant)
            if not merged or not adapter:
                continue
            tokens = statistics.median(rollout["tokens"] for rollout in (*merged, *adapter))
            cells = [f"`{one['case']}`, `{other['case']}`", variant, f"{tokens:.0f}", within(merged), within(adapter)]
            rows.append(cells)
    if not rows:
        return []
    title = "Seconds of a rollout with the adapter merged into the weights, and served by the engine"
    title += f" (each known to {POLL_SECONDS} s only):"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
