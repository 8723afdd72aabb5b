# SPDX-License-Identifier: Apache-2.0
"""Reports of one sync as verl's own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_sync_plugin.report.sync_report import SyncReport

ACTIVE = "sync/active"  # the metric that stock verl never has: 1 in every step of a run whose weights the plugin moves

# What is counted beside an engine: of a trainer rank with none beside it these would be zeros that say nothing
BESIDE_ENGINES = frozenset(
    f"sync/{name}"
    for name in (
        *("coverage_expected", "coverage_missing", "replayed_tensors", "activation_bytes"),
        *("own_bytes", "peer_bytes", "gathered_bytes", "network_bytes", "direct_bytes"),
    )
)


def timing_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by ``sync/<stage>`` for verl's ``timing_raw``: the slowest replica counts.

    Args:
        reports: ``SyncReport.as_dict`` of each replica's leader.
    """
    names = {name for report in reports for name in report["stages"]}
    timing = {f"sync/{name}": max(report["stages"].get(name, 0.0) for report in reports) for name in sorted(names)}
    timing["sync/phase"] = max(SyncReport(**report).phase_seconds for report in reports)
    return timing


def metrics_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``sync/...`` metrics: sums of bytes over replicas, maxima of the rest."""
    built = [SyncReport(**report) for report in reports]
    return {
        ACTIVE: 1.0,
        "sync/bytes": float(sum(report.nbytes for report in built)),
        "sync/gigabytes_per_second": min(report.gigabytes_per_second for report in built),
        "sync/buckets": float(max(report.buckets for report in built)),
        "sync/bucket_bytes": float(max(report.bucket_bytes for report in built)),
        "sync/emptied_caches": float(max(report.emptied_caches for report in built)),
        "sync/released_bytes": float(max(report.released_bytes for report in built)),
        "sync/tensors": float(max(report.tensors for report in built)),
        "sync/peak_device_bytes": float(max(report.peak_device_bytes for report in built)),
        "sync/peak_host_bytes": float(max(report.peak_host_bytes for report in built)),
        "sync/coverage_expected": float(max(report.coverage_expected for report in built)),
        "sync/coverage_missing": float(max(report.coverage_missing for report in built)),
        "sync/own_bytes": float(sum(report.own_bytes for report in built)),
        "sync/peer_bytes": float(sum(report.peer_bytes for report in built)),
        "sync/gathered_bytes": float(sum(report.gathered_bytes for report in built)),
        "sync/network_bytes": float(sum(report.network_bytes for report in built)),
        "sync/direct_bytes": float(sum(report.direct_bytes for report in built)),
        "sync/activation_bytes": float(max(report.activation_bytes for report in built)),
        "sync/verified_tensors": float(min(report.verified_tensors for report in built)),
        "sync/not_comparable": float(max(report.not_comparable for report in built)),
        "sync/replayed_tensors": float(min(report.replayed_tensors for report in built)),
        "sync/weight_version": float(max(report.global_steps for report in built)),
    }


def sent(report: Mapping[str, Any]) -> dict[str, float]:
    """What a trainer rank without an engine beside it knows of a sync, as metrics: ``timing_s/sync/...`` too.

    Args:
        report: its own ``SyncReport.as_dict``.
    """
    timing = {f"timing_s/{name}": value for name, value in timing_of([report]).items()}
    return {**timing, **{name: value for name, value in metrics_of([report]).items() if name not in BESIDE_ENGINES}}
