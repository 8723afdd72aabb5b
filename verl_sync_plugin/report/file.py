# SPDX-License-Identifier: Apache-2.0
"""Where a leader leaves the report of a sync beside verl's own metrics."""

from __future__ import annotations

import importlib.metadata
import json
import os
from contextlib import suppress
from typing import Any

from verl_sync_plugin import compat
from verl_sync_plugin.log import say
from verl_sync_plugin.report.sync_report import SyncReport

REPORT_FILE_VARIABLE = "VERL_SYNC_REPORT_FILE"
EVENT = "sync_report"  # marks our lines, beside which others may stand

_told_versions: set[str] = set()  # files that this process has told its versions


def write_report(report: SyncReport) -> None:
    """One line into the log, and one JSON line into the file named by ``VERL_SYNC_REPORT_FILE``, if any; a process's
    first line in it also has the versions of the packages here."""
    say(report.line())
    path = os.environ.get(REPORT_FILE_VARIABLE)
    if not path:
        return
    line: dict[str, Any] = {"event": EVENT, **report.as_dict()}
    if path not in _told_versions:
        line["versions"] = installed_versions()
    try:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        _told_versions.add(path)
    except OSError as error:  # the weights are in place; a lost line must not end the run
        say(f"{REPORT_FILE_VARIABLE}={path}: the report of this sync is not written: {error}")


def installed_versions() -> dict[str, str]:
    """Versions of the packages that take part in a sync, as far as they are installed here."""
    found = {}
    for package in compat.STACK:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
