# SPDX-License-Identifier: Apache-2.0
"""From the lines of a probe file to seconds per stage and sync."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.schema import STAGES

STOCK_ADAPTER = "ServerAdapter"
# what the plugin may move between its calls, so that only its own report can split it
REPORTED = ("resume_weights", "update_weights", "resume_kv")
# the plugin's names for the ends of the stages inside the trainer's call
MOMENTS = {"weights": "resume_weights", "synced": "update_weights", "awake": "resume_kv"}
Record = dict[str, Any]


class ProbeError(ValueError):
    """A probe file that no phase can be computed from."""


@dataclass
class Sync:
    """One sync over all ranks.

    Attributes:
        stages: seconds per stage; split by the plugin's report where there is one.
        outer: seconds by the probe's own clock around the calls, ``call`` being the trainer's whole ``update_weights``.
        bytes: weight bytes delivered; None where nothing counted them.
        peak_device_bytes: most bytes in use on a device while the sync ran, as the probe sampled it; or None.
        peak_host_bytes: largest resident set of any trainer process while the sync ran.
        host_used_peak_bytes: most host memory in use on the machine while the sync ran.
        report: the numbers of the plugin's own report, the largest of all replicas; empty for stock verl.
        device_used_bytes: device memory in use by all processes after each stage.
    """

    stages: dict[str, float]
    outer: dict[str, float]
    bytes: int | None
    peak_device_bytes: int | None
    peak_host_bytes: int
    host_used_peak_bytes: int | None
    report: dict[str, float] = field(default_factory=dict)
    device_used_bytes: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> list[Record]:
    """The records of a probe file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _stage(record: Record) -> str | None:
    """The stage a record belongs to; ``phase`` for the trainer's whole call."""
    event = record["event"]
    if event == "resume":
        return {"weights": "resume_weights", "kv_cache": "resume_kv"}.get(",".join(record.get("tags") or ()))
    return {"sync": "call", "sleep": "sleep", "update_weights": "update_weights"}.get(event)


def _in_order(records: Iterable[Record]) -> dict[str, dict[int, list[Record]]]:
    """Records by stage and rank, each list in the order of time: the n-th of a rank belongs to the n-th sync."""
    found: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda item: float(item.get("t", 0.0))):
        stage = _stage(record)
        if stage is not None and record.get("ok", True):
            found[stage][int(record["rank"])].append(record)
    for rank, updates in found["update_weights"].items():
        found["update_weights"][rank] = _joined_in_calls(updates, found["call"].get(rank, []))
    return found


def _joined_in_calls(updates: list[Record], calls: list[Record]) -> list[Record]:
    """One ``update_weights`` per trainer's call: with an adapter that the engine serves, verl's first sync has two."""
    joined: dict[Any, Record] = {}
    for position, record in enumerate(updates):
        around = [
            call["start"] for call in calls if call["start"] <= record["start"] <= call["start"] + call["seconds"]
        ]
        key = around[0] if around else ("alone", position)
        before = joined.get(key)
        joined[key] = record if before is None else {**record, "seconds": before["seconds"] + record["seconds"]}
        if before is not None and "nbytes" in before:
            joined[key]["nbytes"] = before["nbytes"] + record.get("nbytes", 0)
    return list(joined.values())


def reports_of(records: Iterable[Record]) -> list[list[Record]]:
    """The plugin's reports sync by sync; every replica's leader writes one, with the weight version it delivered."""
    by_version: dict[Any, list[Record]] = defaultdict(list)
    for position, record in enumerate(records):
        if record["event"] == "sync_report":
            version = record.get("global_steps", -1)
            by_version[("unversioned", position) if version == -1 else version].append(record)
    return list(by_version.values())


def _nth(by_rank: dict[int, list[Record]], index: int) -> list[Record]:
    return [records[index] for records in by_rank.values() if index < len(records)]


def largest(records: Iterable[Record], key: str) -> Any:
    """The largest number that any record has under a key; ``None`` where none has it."""
    values = [record[key] for record in records if record.get(key) is not None]
    return max(values) if values else None


def _reported_stages(reports: list[Record]) -> dict[str, float]:
    stages: dict[str, float] = {}
    for report in reports:
        for name, seconds in (report.get("stages") or {}).items():
            if name in REPORTED and seconds is not None:
                stages[name] = max(stages.get(name, 0.0), round(float(seconds), 6))
    return stages


def report_numbers(reports: list[Record]) -> dict[str, float]:
    """The numbers of the plugin's reports of one sync, the largest of all."""
    flat = [
        {**report, **{f"stage/{name}": s for name, s in (report.get("stages") or {}).items()}} for report in reports
    ]
    names = {name for report in flat for name, value in report.items() if isinstance(value, int | float)}
    return {name: largest(flat, name) for name in sorted(names)}


def _device_used(parts: dict[str, list[Record]], reports: list[Record]) -> dict[str, int]:
    """Device memory in use by all processes after each stage, on the device that used most.

    The probe sees it at the end of each stage call; the plugin resumes inside ``update_weights``, so its report, where
    there is one, says more exactly when.
    """
    used = {name: largest(records, "device_used_bytes") for name, records in parts.items()}
    for moment, name in MOMENTS.items():
        said = [(report.get("device_used_bytes") or {}).get(moment) for report in reports]
        if known := [value for value in said if value is not None]:
            used[name] = max(known)
    return {name: int(value) for name, value in used.items() if value is not None}


def _sync(found: dict[str, dict[int, list[Record]]], index: int, sleeps_first: bool, reports: list[Record]) -> Sync:
    calls = _nth(found["call"], index)
    parts = {name: _nth(found[name], index) for name in ("resume_weights", "update_weights", "resume_kv")}
    sleep_index = index if sleeps_first else index - 1
    parts["sleep"] = _nth(found["sleep"], sleep_index) if sleep_index >= 0 else []
    outer = {name: round(float(largest(records, "seconds") or 0.0), 6) for name, records in parts.items()}
    outer["call"] = round(float(largest(calls, "seconds")), 6)
    phase = round(outer["sleep"] + outer["call"], 6)
    delivered = largest([*reports, *parts["update_weights"]], "nbytes")
    return Sync(
        stages={**{name: outer[name] for name in parts}, **_reported_stages(reports), "phase": phase},
        outer=outer,
        bytes=delivered,
        peak_device_bytes=largest(calls, "peak_device_bytes"),
        peak_host_bytes=int(largest(calls, "rss_peak_bytes") or 0),
        host_used_peak_bytes=largest(calls, "host_used_peak_bytes"),
        report=report_numbers(reports),
        device_used_bytes=_device_used(parts, reports),
    )


def syncs(records: Iterable[Record]) -> list[Sync]:
    """All syncs of a run in order; the first is the one at start, a warm-up.

    A sync needs the whole call of every rank; a run cut short in the middle of one does not count it.

    Raises:
        ProbeError: no sync is complete, or ranks disagree by more than the one cut short.
    """
    records = list(records)
    found, reports = _in_order(records), reports_of(records)
    counts = {rank: len(calls) for rank, calls in found["call"].items()}
    if not counts:
        raise ProbeError(
            "no complete sync in the probe file: did verl load benchmarks.phase.probe, and training start?"
        )
    if max(counts.values()) - min(counts.values()) > 1:
        raise ProbeError(f"ranks recorded different numbers of syncs: {counts}")
    first_call = min(calls[0]["start"] for calls in found["call"].values())
    first_sleep = min((sleeps[0]["start"] for sleeps in found["sleep"].values()), default=None)
    sleeps_first = first_sleep is not None and first_sleep < first_call
    reports += [[]] * max(counts.values())  # stock verl writes none
    return [_sync(found, index, sleeps_first, reports[index]) for index in range(min(counts.values()))]


def check_cut_short(records: list[Record], ended: float, least: int) -> None:
    """Whether a run that was ended from outside counts: it must have gone on well until then.

    Args:
        records: of the probe file.
        ended: when, in seconds since the epoch.
        least: measured syncs that it needs.

    Raises:
        ProbeError: it does not; says why.
    """
    if not all(record.get("ok", True) for record in records):
        raise ProbeError("a call failed before the time limit")
    done = sorted(record["t"] for record in records if record["event"] == "sync")
    complete = len(syncs(records)) - 1
    if complete < least:
        raise ProbeError(f"{complete} measured syncs within the time limit, fewer than {least}")
    longest = max(after - before for before, after in pairwise(done))
    if ended - done[-1] > 3 * longest:
        raise ProbeError(f"no sync in the last {ended - done[-1]:.0f} s before the time limit: the run stood still")


def adapter_classes(records: Iterable[Record]) -> set[str]:
    """The classes that delivered the weights: they tell which variant really ran."""
    return {str(record.get("class")) for record in records if record["event"] == "update_weights"}


def medians(measured: list[Sync]) -> dict[str, float]:
    """Median seconds per stage.

    Raises:
        ProbeError: there is nothing to take a median of.
    """
    if not measured:
        raise ProbeError("no sync after the warm-up: the run needs at least one training step")
    return {name: round(statistics.median(sync.stages[name] for sync in measured), 6) for name in STAGES}
