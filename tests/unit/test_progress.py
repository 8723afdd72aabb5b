# SPDX-License-Identifier: Apache-2.0
"""A sync that takes long says how far it has come; one that does not says nothing."""

from __future__ import annotations

import threading
import time

import pytest

from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, Plan, View
from verl_sync_plugin.report import progress
from verl_sync_plugin.report.progress import Progress, progress_line
from verl_sync_plugin.report.sync_report import SyncReport
from verl_sync_plugin.transport.protocol import ALL


def plan(buckets: int = 4, size: int = 64) -> Plan:
    bases = tuple(Base(f"w{i}", "uint8", 1, (size,), (View(f"w{i}", (size,), 0, size),)) for i in range(buckets))
    return plan_buckets(bases, size)


def test_line_names_bucket_bytes_and_stage() -> None:
    report = SyncReport.begun(3, "M", 0)
    assert progress_line(report, 6.2) == "sync of step 3: 6 s so far, no bucket handed over yet"
    report.handed_over = (plan(size=10**7), 0)
    with report.stage("update_weights"), report.stage("wait_engine"):
        line = progress_line(report, 11.0)
    assert line == "sync of step 3: 11 s so far, bucket 1 of 4, 0.01 of 0.04 GB, now in wait_engine"
    report.handed_over = (plan(size=10**7), ALL)
    assert "bucket 4 of 4, 0.04 of 0.04 GB" in progress_line(report, 11.0)


def test_only_what_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.1)
    report = SyncReport.begun(0, "M", 0)
    with Progress(report, speaks=True):
        pass
    assert capsys.readouterr().out == ""
    with Progress(report, speaks=True), report.stage("connect"):
        time.sleep(0.55)
    said = capsys.readouterr().out.splitlines()
    assert 2 <= len(said) <= 5 and all("now in connect" in line for line in said)
    assert said[0].startswith("[verl-sync-plugin] pid ")
    with Progress(report, speaks=False):
        time.sleep(0.3)
    assert capsys.readouterr().out == ""


def test_nothing_is_left_running_when_a_sync_fails() -> None:
    with pytest.raises(RuntimeError), Progress(SyncReport(), speaks=True):
        raise RuntimeError
    assert "sync progress" not in {thread.name for thread in threading.enumerate()}


def test_five_seconds_are_long() -> None:
    assert progress.SILENT_SECONDS == 5.0
