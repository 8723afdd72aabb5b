# SPDX-License-Identifier: Apache-2.0
"""Report files as ``verl-sync report`` reads them: of older versions, of several runs and hosts, broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from report_pages import line, page_of, refused, written
from verl_sync_plugin.report import REPORT_FILE_VARIABLE, SyncReport, write_report


class TestReading:
    def test_a_file_of_an_older_version(self, tmp_path: Path) -> None:
        kept = ("event", "global_steps", "manager", "stages", "nbytes", "tensors", "coverage_expected")
        old = {key: value for key, value in line(0).items() if key in kept}
        _, page = page_of(written(tmp_path, old, {**old, "global_steps": 1}))
        assert page.row("syncs", "1")[0] == "0.41 s" and page.row("stages-of-0", "sleep") == ["0.12 s"]
        assert "Versions: unknown" in page.text

    def test_what_a_leader_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "reports.jsonl"))
        for step in range(2):
            report = SyncReport.begun(step, "M", 3)
            with report.stage("update_weights"), report.stage("pack"):
                pass
            write_report(report)
        lines = [json.loads(text) for text in (tmp_path / "reports.jsonl").read_text().splitlines()]
        assert "versions" in lines[0] and "versions" not in lines[1]
        _, page = page_of(tmp_path)
        assert f"torch {lines[0]['versions']['torch']}" in page.text
        assert page.cells["reporter-numbers"][1][0].startswith("M, rank 3 on ")

    def test_a_folder_with_the_files_of_two_hosts(self, tmp_path: Path) -> None:
        written(tmp_path, *(line(step, 8) for step in range(3)), name="a.jsonl")
        (tmp_path / "inner").mkdir()
        written(tmp_path / "inner", *(line(step, 0) for step in range(3)), name="b.jsonl")
        written(tmp_path, {"event": "another"}, name="c.jsonl")
        _, page = page_of(tmp_path)
        assert [cells[0] for cells in page.cells["syncs"][1:]] == ["0", "1", "2"]
        assert len(page.cells["reporter-numbers"]) == 3

    def test_of_several_runs_in_a_file_the_last(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first, second = [line(step) for step in range(5)], [line(step, pid=8) for step in range(4, 6)]
        file = written(tmp_path, *first, *second, *(line(step, pid=9) for step in range(3)))
        _, page = page_of(file)
        assert len(page.cells["syncs"]) == 4 and "Run 3 of 3" in page.text
        _, page = page_of(file, "--run", "2")
        assert [cells[0] for cells in page.cells["syncs"][1:]] == ["4", "5"]
        assert "use --run 1 to 3" in refused(capsys, str(file), "--run", "4")

    def test_a_line_cut_short_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _, page = page_of(written(tmp_path, line(0), json.dumps(line(1))[:70]))
        assert "reports.jsonl:2" in page.text and "reports.jsonl:2" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "no such file or folder"),
            ("", "no sync reports in it"),
            ("what a run printed\n", "no sync reports in it"),
            (b"\x00\xff\x93NUMPY", "no sync reports in it"),
            ('{"event": "another"}\n', "no sync reports in it"),
            ('{"event": "sync_report", "stages": 3}\n', "file:1: stages is 3, no dict; remove that line"),
            ('{"event": "sync_report", "stages": {"sleep": "x"}}\n', "file:1: a stage or a reading is no number"),
        ],
    )
    def test_a_bad_file_is_one_line_with_a_remedy(
        self, content: str | bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if content is not None:
            (tmp_path / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
        text = refused(capsys, str(tmp_path / "file"))
        assert said in text
        assert "remove that line" in text or f"env_vars.{REPORT_FILE_VARIABLE}=" in text

    def test_where_the_page_cannot_go(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = written(tmp_path, line(0))
        assert "name another place" in refused(capsys, str(file), "--out", str(tmp_path / "nowhere" / "page.html"))

    def test_needs_no_torch(self, tmp_path: Path) -> None:
        code = (
            "import sys; from verl_sync_plugin.cli import report; "
            "assert not {'torch', 'verl', 'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
