# SPDX-License-Identifier: Apache-2.0
"""Rollout throughput of LoRA runs: the adapter merged into the weights against the adapter served by the engine."""

from __future__ import annotations

import json
import statistics
from typing import Any

HEAD = ("cases", "variant", "merged", "adapter", "adapter / merged")
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


def tokens_per_second(result: dict[str, Any], variant: str) -> float | None:
    """The median rollout of all repeats; the first of each run is a warm-up."""
    rates = [
        rollout["tokens"] / rollout["seconds"]
        for run in result["runs"]
        if run["variant"] == variant
        for rollout in run["samples"].get("rollouts", [])[1:]
    ]
    return statistics.median(rates) if rates else None


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
            merged, adapter = tokens_per_second(one, variant), tokens_per_second(other, variant)
            if merged is None or adapter is None:
                continue
            rates = [f"{merged:.0f} tokens/s", f"{adapter:.0f} tokens/s", f"{adapter / merged:.2f}"]
            rows.append([f"`{one['case']}`, `{other['case']}`", variant, *rates])
    if not rows:
        return []
    # verl's replay buffer looks for finished rollouts that often
    title = "Rollouts with the adapter merged into the weights, and served by the engine (each known to 2 s only):"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return ["", title, "", *lines, *("| " + " | ".join(row) + " |" for row in rows)]
