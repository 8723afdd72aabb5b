# SPDX-License-Identifier: Apache-2.0
"""Whether the reports of syncs get into the trainer's metrics, and a line in the log where they do not."""

from __future__ import annotations

from verl_sync_plugin.log import say
from verl_sync_plugin.report.file import REPORT_FILE_VARIABLE

_logs_reports = False  # a trainer of this process puts the reports of syncs into its metrics
_said = False


def expect_metrics() -> None:
    """Notes that a trainer of the plugin is being built in this process, which takes the reports."""
    global _logs_reports
    _logs_reports = True


def say_without_metrics() -> None:
    """Says, once per process, when no trainer of ours is there to put the reports of syncs into its metrics."""
    global _said
    if not _logs_reports and not _said:
        _said = True
        say(
            "task runner: NO SYNC METRICS: the plugin does not extend this trainer (verl's legacy trainer, or one that "
            "another plugin registered later), so it logs no timing_s/sync/* and sync/*. Each sync is reported in a "
            f"log line, and in the file that {REPORT_FILE_VARIABLE} names."
        )
