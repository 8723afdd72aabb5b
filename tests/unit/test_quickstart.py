# SPDX-License-Identifier: Apache-2.0
"""Checks what the quickstart's script shows and leaves; ``main_ppo`` is a stand-in here, and real in ``tests/e2e``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_sync_plugin.report import SyncReport

RUN_SH = Path(__file__).parents[2] / "examples" / "cpu_quickstart" / "run.sh"
STAND_IN = """#!/bin/bash
case "$*" in
    *verl_sync_plugin.cli*) exec {python} "$@" ;;
    *"-m verl.trainer.main_ppo"*)
        echo "a line of somebody else's"
        if [[ $SYNCS == yes ]]; then
            cat {reports} >> "$VERL_SYNC_REPORT_FILE"
            echo "(TaskRunner pid=7) [verl-sync-plugin] pid 7 {line}"
        fi
        echo "(TaskRunner pid=7) step:1 - a/b:1 - c/d:2"
        echo "$WORDS"
        exit $ENDS ;;
esac
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    report = SyncReport.begun(1, "Manager", rank=0)
    report.delivery, report.tensors, report.nbytes, report.hashed_tensors = "direct", 27, 230_000, 27
    report.note_stage("update_weights", 0.0, 0.25)
    (folder / "given.jsonl").write_text(json.dumps({"event": "sync_report", **report.as_dict()}) + "\n")
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, reports=folder / "given.jsonl", line=report.line()))
    stand_in.chmod(0o755)
    given = {"PYTHON": str(stand_in), "WORK": f"{folder}/work", "SYNCS": "yes", "WORDS": "step:2 - a/b:1", "ENDS": "0"}
    return subprocess.run(
        ["bash", str(RUN_SH)], env={**os.environ, **given, **environment}, capture_output=True, text=True, timeout=100
    )


def test_it_ends_with_five_lines_and_leaves_log_and_page(tmp_path: Path) -> None:
    ended, work = run(tmp_path), tmp_path / "work"
    assert ended.returncode == 0, ended.stderr
    first, sync, one, two, *last = ended.stdout.splitlines()
    assert str(work / "run.log") in first and [one, two] == ["step:1 ", "step:2 "]
    assert sync == "[verl-sync-plugin] pid 7 sync of step 1: 0.250 s, 27 tensors, 0.23 MB, direct, hashed 27"
    assert len(last) == 5 and last[0].startswith("quickstart: reached step 2")
    assert "sync of step 1: 0.250 s" in last[1] and str(work / "sync-report.html") in last[2]
    assert str(work / "run.log") in last[3] and "verl-sync doctor" in last[4]
    assert "a line of somebody else's" in (work / "run.log").read_text()
    assert "<html" in (work / "sync-report.html").read_text()


@pytest.mark.parametrize("shown", ["plugin", "all"])
def test_without_syncs_or_a_file_of_its_own_it_makes_no_page(shown: str, tmp_path: Path) -> None:
    ended = run(tmp_path, SYNCS="no", SHOW=shown, VERL_SYNC_REPORT_FILE=str(tmp_path / "mine.jsonl"))
    assert ended.returncode == 0 and ("somebody else's" in ended.stdout) is (shown == "all")
    assert "stock verl moved the weights" in ended.stdout and str(tmp_path / "mine.jsonl") in ended.stdout
    assert not (tmp_path / "work" / "sync-report.html").exists()


@pytest.mark.parametrize(("ends", "words", "code"), [("3", "step:2 - a", 3), ("0", "no more steps", 1)])
def test_a_failure_shows_the_end_of_the_log(ends: str, words: str, code: int, tmp_path: Path) -> None:
    ended = run(tmp_path, ENDS=ends, WORDS=words)
    assert ended.returncode == code and "somebody else's" in ended.stderr and "reached" not in ended.stdout
