# SPDX-License-Identifier: Apache-2.0
"""The figures of the page: what is drawn, as numbers, without a word of HTML."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_sync_plugin.timeline.read import Report, Run, Sync, phase_seconds, reporter_of

COLUMNS = 120  # columns of a chart at most; more syncs share one

# In the order of a sync
MOMENTS = {
    "asleep": "before the engine wakes",
    "weights": "engine's weights awake",
    "synced": "weights moved",
    "room": "room made",
    "awake": "KV cache awake",
}
WAYS = {
    "own_direct": "own GPU, read in place",
    "peer_direct": "other ranks, read in place",
    "own_staged": "own GPU, staged",
    "peer_staged": "other ranks, staged",
    "gathered": "gathered between trainer ranks",
}


@dataclass(frozen=True)
class Column:
    """One or several syncs in a row.

    Attributes:
        label: their step or steps.
        parts: the mean of each part over these syncs, so that parts and sums stay true.
    """

    label: str
    parts: dict[str, float]


@dataclass(frozen=True)
class Moment:
    """Device memory at one moment of a sync, in bytes; parts add up to what all processes use."""

    name: str
    parts: dict[str, int]


def columns(syncs: Sequence[Sync], parts_of: Callable[[Report], dict[str, float]]) -> list[Column]:
    """The slowest report of each sync, in at most ``COLUMNS`` groups of successive syncs."""
    size = -(-len(syncs) // COLUMNS)
    groups = [syncs[start : start + size] for start in range(0, len(syncs), size)] if syncs else []
    return [_column(group, parts_of) for group in groups]


def _column(group: Sequence[Sync], parts_of: Callable[[Report], dict[str, float]]) -> Column:
    label = f"{group[0].step}" if len(group) == 1 else f"{group[0].step} to {group[-1].step}"
    each = [parts_of(sync.slowest) for sync in group]
    return Column(label, {name: statistics.fmean(parts[name] for parts in each) for name in each[0]})


def bytes_by_way(report: Report) -> dict[str, float]:
    """Bytes of one report by ``WAYS``. A sync is read in place as a whole, or not at all."""
    direct = report["direct_bytes"] > 0
    own, peer = float(report["own_bytes"]), float(report["peer_bytes"])
    staged = (0.0, 0.0) if direct else (own, peer)
    in_place = (own, peer) if direct else (0.0, 0.0)
    return dict(zip(WAYS, (*in_place, *staged, float(report["gathered_bytes"])), strict=True))


def memory_by_moment(report: Report) -> list[Moment]:
    """Device memory of the reporting rank's GPU by moment; empty for a run without GPUs.

    The engine's parts are what use grew by when it resumed them, less what the trainer's allocator grew by meanwhile.
    In reports of older versions, which do not know the trainer's part, that is in ``others``.
    """
    used, trainer = report["device_used_bytes"], report["trainer_reserved_bytes"]
    others = {name: used[name] - trainer.get(name, 0) for name in MOMENTS if name in used}
    if not others:
        return []
    base = others.get("asleep", min(others.values()))
    weights = max(0, others.get("weights", base) - base)
    before_kv = others.get("room", others.get("synced", base + weights))
    kv = max(0, others.get("awake", before_kv) - before_kv) if "asleep" in others else 0
    return [_moment(name, others[name], trainer.get(name, 0), report, weights, kv) for name in others]


def _moment(name: str, others: int, reserved: int, report: Report, weights: int, kv: int) -> Moment:
    held = {"weights": report["staging_bytes"], "synced": report["kept_staging_bytes"]}.get(name, 0)
    staging = min(held, reserved)
    weights = 0 if name == "asleep" else min(weights, others)
    kv = min(kv, others - weights) if name == "awake" else 0
    parts = {"trainer": reserved - staging, "staging": staging, "weights": weights, "kv_cache": kv}
    return Moment(name, {**parts, "others": others - weights - kv})


def examples(run: Run) -> list[tuple[str, Report]]:
    """The first and the last sync, with their names."""
    chosen = [("first sync", run.syncs[0].slowest)]
    return chosen + ([(f"last sync, step {run.syncs[-1].step}", run.syncs[-1].slowest)] if len(run.syncs) > 1 else [])


def nearest_to_median(syncs: Sequence[Sync]) -> Sync:
    """The sync whose phase is nearest to the median, as an example of all."""
    middle = median_phase(syncs)
    return min(syncs, key=lambda sync: abs(phase_seconds(sync.slowest) - middle))


def median_phase(syncs: Sequence[Sync]) -> float:
    return statistics.median(phase_seconds(sync.slowest) for sync in syncs)


@dataclass(frozen=True)
class Reporter:
    """All syncs that one rank reported."""

    name: str
    device: str
    reports: list[Report]


def reporters(run: Run) -> list[Reporter]:
    """Who reported in a run, in the order in which they first did."""
    found: dict[str, list[Report]] = {}
    for sync in run.syncs:
        for report in sync.reports:
            found.setdefault(reporter_of(report), []).append(report)
    return [Reporter(name, own[0]["origin"].get("device", ""), own) for name, own in found.items()]
