# SPDX-License-Identifier: Apache-2.0
"""From the lines of a probe file to seconds per sync, where trainer and rollout have devices of their own.

The clock is the driver's, around its whole ``CheckpointEngineManager.update_weights``. What servers and ranks did in
that time is what their records say that began within it: ``paused`` is from a server's first abort until it generates
again.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.phase import parse


def syncs(records: Iterable[parse.Record]) -> list[parse.Sync]:
    """All syncs of the separate rollout in order; the first is the one at start, a warm-up.

    Raises:
        ProbeError: there is none.
    """
    records = list(records)
    whole = [record for record in records if record["event"] == "whole" and record.get("backend") != "naive"]
    if not whole:
        raise parse.ProbeError("no sync of a separate rollout in the probe file")
    reports = parse.reports_of(record for record in records if str(record.get("manager")).startswith("Separate"))
    reports += [[]] * len(whole)  # stock verl writes none
    calls = sorted(whole, key=lambda record: float(record["start"]))
    return [_sync(call, records, said) for call, said in zip(calls, reports, strict=False)]


def _sync(call: parse.Record, records: list[parse.Record], reports: list[parse.Record]) -> parse.Sync:
    begin, end = float(call["start"]), float(call["start"]) + float(call["seconds"])
    inside = [record for record in records if begin <= float(record.get("start") or 0.0) <= end]
    trainers = [record for record in inside if record["event"] == "sync"]
    rollouts = [record for record in inside if record["event"] == "update_weights"]
    ranks = trainers + rollouts
    outer = {"call": round(float(call["seconds"]), 6)}
    for name, found in (("trainer", trainers), ("rollout", rollouts)):
        outer[name] = round(float(parse.largest(found, "seconds") or 0.0), 6)
    outer["paused"] = round(_paused(inside), 6)
    stages = dict.fromkeys(("sleep", "resume_weights", "resume_kv"), 0.0)
    return parse.Sync(
        stages={**stages, "update_weights": max(outer["trainer"], outer["rollout"]), "phase": outer["call"]},
        outer=outer,
        bytes=parse.largest([*reports, *ranks], "nbytes"),
        peak_device_bytes=parse.largest(ranks, "peak_device_bytes"),
        peak_host_bytes=int(parse.largest(ranks, "rss_peak_bytes") or 0),
        host_used_peak_bytes=parse.largest(ranks, "host_used_peak_bytes"),
        report=parse.report_numbers(reports),
    )


def _paused(inside: list[parse.Record]) -> float:
    """Seconds of the server that is paused longest."""
    longest = 0.0
    for server in {record["pid"] for record in inside if record["event"] == "stop"}:
        own = [record for record in inside if record["pid"] == server]
        stopped = min(float(record["start"]) for record in own if record["event"] == "stop")
        went_on = [float(record["start"]) + float(record["seconds"]) for record in own if record["event"] == "go_on"]
        longest = max([longest, *(end - stopped for end in went_on)])
    return longest
