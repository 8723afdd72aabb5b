# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: its page shows the figures of the report file, and nothing in it points elsewhere."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

import pytest

from report_pages import line, page_of, refused, written
from verl_sync_plugin.report import PHASE_STAGES


def test_stands_alone(tmp_path: Path) -> None:
    text, _ = page_of(written(tmp_path, *(line(step) for step in range(3))))
    assert "<script" not in text and "@import" not in text and 'name="viewport"' in text
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', text)
    assert links and all(target.startswith("#") for pair in links for target in pair if target)


def test_figures_are_those_of_the_file(tmp_path: Path) -> None:
    lines = [line(step) for step in range(5)]
    _, page = page_of(written(tmp_path, *lines))
    phases = [sum(each["stages"].get(stage, 0) for stage in PHASE_STAGES) for each in lines]
    assert f"The first phase took {phases[0]:.2f} s" in page.text
    assert f"{statistics.median(phases[1:]):.2f} s in the median and {phases[-1]:.2f} s at most (step 4)" in page.text
    assert "Every sync wrote every parameter" in page.text and "on NVIDIA H200, 2026-" in page.text
    assert page.cells["syncs"][0] == ["step", "phase", "sleep", "update_weights", "resume_kv"]
    assert page.row("syncs", "2") == ["0.53 s", "0.12 s", "0.38 s", "31 ms"]
    assert page.row("ends", "bytes sent") == ["16.00 GB"] * 2 and page.row("ends", "delivery") == ["direct"] * 2
    assert page.row("ends", "tensors compared in the engine") == ["337", "337"]
    assert page.row("ends", "staging memory held") == ["1.0 GiB", "1.0 GiB"]
    assert "GiB in use of the reporting rank's GPU" in page.text and "engine_load  0.12 s" in page.text


def test_says_in_red_what_a_sync_does_not_write(tmp_path: Path) -> None:
    text, page = page_of(written(tmp_path, line(0), line(1, coverage_missing=3)))
    assert 'class="bad">1 syncs, from step 1 on, left parameters unwritten.' in text
    assert page.row("ends", "engine parameters not written whole") == ["0", "3"]


def test_the_slowest_of_several_ranks_is_shown_and_all_are_named(tmp_path: Path) -> None:
    _, page = page_of(written(tmp_path, *(line(step, rank) for step in range(3) for rank in (0, 8))))
    slow = line(2, 8)["stages"]["update_weights"]
    assert page.row("syncs", "2")[2] == f"{slow:.2f} s"
    assert [row[0].split(", ")[1] for row in page.cells["reporter-numbers"][1:]] == [
        "rank 0 on node0",
        "rank 8 on node1",
    ]


def test_many_syncs_share_bars_and_the_slowest_stays_visible(tmp_path: Path) -> None:
    lines = [line(step) for step in range(500)]
    lines[250]["stages"]["sleep"] = 60.0
    text, page = page_of(written(tmp_path, *lines))
    assert "A bar is the mean of 5 syncs" in page.text and "slowest of a bar" in page.text
    assert len(page.cells["syncs"]) == 501 and len(text) < 2_000_000


def test_two_runs_next_to_each_other(tmp_path: Path) -> None:
    file = written(tmp_path, *(line(step) for step in range(3)))
    slower = written(tmp_path, *(line(step, 16) for step in range(3)), name="other")
    _, page = page_of(file, "--against", str(slower))
    assert page.row("medians", "update_weights") == ["0.34 s", "0.59 s"]


def test_texts_of_the_file_are_no_markup(tmp_path: Path) -> None:
    spans = [('"><script>', 1.0, 1.0)]
    text, _ = page_of(written(tmp_path, line(0, manager="<script>alert(1)</script>", spans=spans)))
    assert "<script" not in text


def test_without_a_gpu(tmp_path: Path) -> None:
    _, page = page_of(written(tmp_path, line(0, device_used_bytes={}, trainer_reserved_bytes={})))
    assert "the run had no GPU" in page.text


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "verl_sync_plugin.cli.report.page", raising=False)
    assert "pip install matplotlib" in refused(capsys, str(written(tmp_path, line(0))))
