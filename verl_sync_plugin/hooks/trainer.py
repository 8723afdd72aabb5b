"""Trainers: verl's own, which also log what each sync cost."""

from __future__ import annotations

from typing import Any

import ray

from verl_sync_plugin.metrics import metrics_of, timing_of


class SyncReportMixin:
    """Adds the reports of the last sync to verl's ``timing_raw`` and to the metrics of the step."""

    def on_step_end(self) -> None:
        """verl's hook; ``update_weights`` has run when the super call returns."""
        super().on_step_end()  # type: ignore[misc]
        reports = take_reports(self.checkpoint_manager.replicas)  # type: ignore[attr-defined]
        if reports:
            self.timing_raw.update(timing_of(reports))  # type: ignore[attr-defined]
            pending = dict(getattr(self, "_pending_sync_metrics", None) or {})
            self._pending_sync_metrics = {**pending, **metrics_of(reports)}


def take_reports(replicas: list[Any]) -> list[dict[str, Any]]:
    """The last report of every replica that the plugin serves; empty when it serves none."""
    ours = [replica.servers[0] for replica in replicas if getattr(replica, "syncs_weights", False)]
    reports = ray.get([server.take_sync_report.remote() for server in ours])
    return [report for report in reports if report is not None]


def reporting(trainer: type) -> type:
    """``trainer`` with reports; the class keeps its name."""
    return type(trainer.__name__, (SyncReportMixin, trainer), {"__module__": trainer.__module__})
