# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: what it reads of older versions, several runs and broken files, its page, and its trace."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verl_sync_plugin.cli import main
from verl_sync_plugin.report import PHASE_STAGES, REPORT_FILE_VARIABLE, SyncReport, write_report

GIB = 2**30


def line(step: int, rank: int = 0, pid: int = 7, **changes: Any) -> dict[str, Any]:
    """A report of this version: of a sync that read in place, 10 s after the one before."""
    start = 1000.0 + 10 * step
    report = SyncReport(
        step,
        "FSDP2SGLangShardingManager",
        stages={
            "sleep": 0.125, "update_weights": 0.25 + step / 16 + rank / 64, "resume_kv": 0.03125, "engine_load": 0.125,
        },
        nbytes=16_000_000_000,
        tensors=339,
        coverage_expected=199,
        own_bytes=6_000_000_000,
        peer_bytes=2_000_000_000,
        direct_bytes=8_000_000_000,
        delivery="direct",
        hashed_tensors=339,
        verified_tensors=337,
        not_comparable=2,
        staging_bytes=GIB,
        device_total_bytes=140 * GIB,
        device_used_bytes={
            "asleep": 50 * GIB, "weights": 58 * GIB, "synced": 58 * GIB, "room": 55 * GIB, "awake": 95 * GIB,
        },
        trainer_reserved_bytes={
            "asleep": 40 * GIB, "weights": 41 * GIB, "synced": 41 * GIB, "room": 38 * GIB, "awake": 38 * GIB,
        },
        origin={"host": f"node{rank // 8}", "pid": pid, "rank": rank, "device": "NVIDIA H200", "epoch": 1.79e9},
        spans=[
            ("connect", start + 0.0625, 0.0625),
            ("engine_load", start + 0.125, 0.125),
            ("update_weights", start, 0.25 + step / 16),
            ("resume_kv", start + 1.5, 0.03125),
        ],
    )  # fmt: skip
    return {"event": "sync_report", **report.as_dict(), **changes}


class Page(HTMLParser):
    """The cells of a page's tables by the table's id, and its text without markup."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.cells: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._table = dict(attrs).get("id") or ""
        elif tag == "tr":
            self.cells.setdefault(self._table, []).append([])
        elif tag in ("td", "th"):
            self.cells[self._table][-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.lasttag in ("td", "th"):
            self.cells[self._table][-1][-1] += data

    def row(self, table: str, heading: str) -> list[str]:
        (found,) = [cells for cells in self.cells[table] if cells[0] == heading]
        return found[1:]


def written(folder: Path, *lines: Any, name: str = "reports.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return file


def page_of(file: Path, *options: str) -> tuple[str, Page]:
    assert main(["report", str(file), *options]) == 0
    folder = file if file.is_dir() else file.parent
    text = (folder / "sync-report.html").read_text(encoding="utf-8")
    return text, Page(text)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("verl-sync report: ")]
    return said


def test_figures_are_those_of_the_file_and_nothing_points_elsewhere(tmp_path: Path) -> None:
    lines = [line(step) for step in range(5)]
    text, page = page_of(written(tmp_path, *lines))
    assert "<script" not in text and "@import" not in text and 'name="viewport"' in text
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', text)
    assert links and all(target.startswith("#") for pair in links for target in pair if target)
    phases = [sum(each["stages"].get(stage, 0) for stage in PHASE_STAGES) for each in lines]
    assert f"The first phase took {phases[0]:.2f} s" in page.text
    assert f"{statistics.median(phases[1:]):.2f} s in the median and {phases[-1]:.2f} s at most (step 4)" in page.text
    assert "Every sync wrote every parameter" in page.text and "on NVIDIA H200, 2026-" in page.text
    assert page.cells["syncs"][0] == ["step", "phase", "sleep", "update_weights", "resume_kv"]
    assert page.row("syncs", "2") == ["0.53 s", "0.12 s", "0.38 s", "31 ms"]
    assert page.row("ends", "bytes sent") == ["16.00 GB"] * 2 and page.row("ends", "delivery") == ["direct"] * 2
    assert page.row("ends", "tensors compared in the engine") == ["337", "337"]
    assert "GiB in use of the reporting rank's GPU" in page.text and "engine_load  0.12 s" in page.text
    _, page = page_of(written(tmp_path, line(0, device_used_bytes={}, trainer_reserved_bytes={})))
    assert "the run had no GPU" in page.text


def test_what_a_sync_does_not_write_and_texts_that_are_no_markup(tmp_path: Path) -> None:
    spans = [('"><script>', 1.0, 1.0)]
    text, page = page_of(written(tmp_path, line(0, manager="<script>", spans=spans), line(1, coverage_missing=3)))
    assert 'class="bad">1 syncs, from step 1 on, left parameters unwritten.' in text and "<script" not in text
    assert page.row("ends", "engine parameters not written whole") == ["0", "3"]


def test_the_slowest_of_several_ranks_is_shown_and_all_are_named(tmp_path: Path) -> None:
    _, page = page_of(written(tmp_path, *(line(step, rank) for step in range(3) for rank in (0, 8))))
    assert page.row("syncs", "2")[2] == f"{line(2, 8)['stages']['update_weights']:.2f} s"
    named = [row[0].split(", ")[1] for row in page.cells["reporter-numbers"][1:]]
    assert named == ["rank 0 on node0", "rank 8 on node1"]


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


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(capsys, str(written(tmp_path, line(0))))


def test_a_file_of_an_older_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("event", "global_steps", "manager", "stages", "nbytes", "tensors", "coverage_expected")
    old = {key: value for key, value in line(0).items() if key in kept}
    file = written(tmp_path, old, {**old, "global_steps": 1})
    _, page = page_of(file)
    assert page.row("syncs", "1")[0] == "0.41 s" and page.row("stages-of-0", "sleep") == ["0.12 s"]
    assert "Versions: unknown" in page.text
    assert "needs a run of this version" in refused(capsys, str(file), "--trace", str(tmp_path / "t.json"))


def test_what_a_leader_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_with_the_files_of_two_hosts(tmp_path: Path) -> None:
    written(tmp_path, *(line(step, 8) for step in range(3)), name="a.jsonl")
    (tmp_path / "inner").mkdir()
    written(tmp_path / "inner", *(line(step, 0) for step in range(3)), name="b.jsonl")
    written(tmp_path, {"event": "another"}, name="c.jsonl")
    _, page = page_of(tmp_path)
    assert [cells[0] for cells in page.cells["syncs"][1:]] == ["0", "1", "2"]
    assert len(page.cells["reporter-numbers"]) == 3


def test_of_several_runs_in_a_file_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [line(step) for step in range(5)], [line(step, pid=8) for step in range(4, 6)]
    file = written(tmp_path, *first, *second, *(line(step, pid=9) for step in range(3)), json.dumps(line(3))[:70])
    _, page = page_of(file)
    assert len(page.cells["syncs"]) == 4 and "Run 3 of 3" in page.text
    assert "reports.jsonl:11" in page.text and "reports.jsonl:11" in capsys.readouterr().out, "a line cut short"
    _, page = page_of(file, "--run", "2")
    assert [cells[0] for cells in page.cells["syncs"][1:]] == ["4", "5"]
    assert "use --run 1 to 3" in refused(capsys, str(file), "--run", "4")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or folder"),
        (b"\x00\xff\x93NUMPY", "no sync reports in it"),
        (b'{"event": "another"}\n', "no sync reports in it"),
        (b'{"event": "sync_report", "stages": 3}\n', "file:1: stages is 3, no dict; remove that line"),
    ],
)
def test_a_bad_file_is_one_line_with_a_remedy(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    text = refused(capsys, str(tmp_path / "file"))
    assert said in text and ("remove that line" in text or f"env_vars.{REPORT_FILE_VARIABLE}=" in text)


def test_where_the_page_cannot_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, line(0))
    assert "name another place" in refused(capsys, str(file), "--out", str(tmp_path / "nowhere" / "page.html"))


def test_needs_no_torch() -> None:
    code = "import sys; from verl_sync_plugin.cli import report; "
    code += "assert not {'torch', 'verl', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_trace_has_the_spans_of_all_ranks_by_one_clock(tmp_path: Path) -> None:
    late = line(1, 8, spans_left_out=2)
    late["origin"]["epoch"] += 0.5
    page_of(written(tmp_path, line(0), line(1), late, line(2)), "--trace", str(tmp_path / "t.json"), "--step", "1")
    trace = json.loads((tmp_path / "t.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {event["name"]: (event["ts"], event["dur"], event["tid"]) for event in events if event["pid"] == 1}
    assert found == {
        "update_weights": (0, 312500, 1), "connect": (62500, 62500, 1), "engine_load": (125000, 125000, 2),
        "resume_kv": (1500000, 31250, 1),
    }  # fmt: skip
    assert [event["ts"] for event in events if event["name"] == "connect"] == [62500, 562500]
    named = {event["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert named == {"process_name", "thread_name"} and trace["otherData"]["spans_left_out"] == 2
    assert set(trace["otherData"]["sleep_seconds"].values()) == {0.125}


def test_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = str(written(tmp_path, line(0))), str(tmp_path / "trace.json")
    assert "there are steps 0 to 0" in refused(capsys, file, "--trace", out, "--step", "3")
    assert "--trace OUT.json" in refused(capsys, file, "--step", "3")
    assert not Path(out).exists()


def test_a_report_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "nowhere" / "file"))
    write_report(SyncReport())
    assert "is not written" in capsys.readouterr().out
    monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "file"))
    write_report(SyncReport())
    assert '"event": "sync_report"' in (tmp_path / "file").read_text()
