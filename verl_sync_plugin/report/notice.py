# SPDX-License-Identifier: Apache-2.0
"""Lines for the log, said once: that the plugin moves the weights, and where its reports get into no metrics."""

from __future__ import annotations

from verl_sync_plugin.log import say
from verl_sync_plugin.report.file import REPORT_FILE_VARIABLE
from verl_sync_plugin.report.sync_report import SyncReport

_logs_reports = False  # a trainer of this process puts the reports of syncs into its metrics
_said = False
_said_who = False


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


def say_who_moves(report: SyncReport) -> None:
    """Says, once per process, that the plugin moves the weights of this run; for the first sync that has succeeded.

    Args:
        report: of that sync.
    """
    global _said_who
    if _said_who:
        return
    _said_who = True
    way = f"delivery {report.delivery}, " if report.delivery else "the adapter alone, "
    say(
        f"moves the weights of this run: {report.manager}, {way}{report.tensors} tensors, "
        f"{report.nbytes / 2**30:.2f} GiB"
    )
