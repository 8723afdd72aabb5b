# SPDX-License-Identifier: Apache-2.0
"""Where a leader leaves the report of a sync beside verl's own metrics."""

from __future__ import annotations

import json
import os

from verl_sync_plugin.log import say
from verl_sync_plugin.report.sync_report import SyncReport

REPORT_FILE_VARIABLE = "VERL_SYNC_REPORT_FILE"


def write_report(report: SyncReport) -> None:
    """One line into the log, and one JSON line into the file named by ``VERL_SYNC_REPORT_FILE``, if any."""
    say(report.line())
    path = os.environ.get(REPORT_FILE_VARIABLE)
    if not path:
        return
    try:
        with open(path, "a") as file:
            file.write(json.dumps({"event": "sync_report", **report.as_dict()}) + "\n")
    except OSError as error:  # the weights are in place; a lost line must not end the run
        say(f"{REPORT_FILE_VARIABLE}={path}: the report of this sync is not written: {error}")
