# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: its page, read by an HTML parser, and its trace, beside the report file they are made from."""

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
from verl_sync_plugin.report.file import REPORT_FILE_VARIABLE, write_report
from verl_sync_plugin.report.sync_report import MAX_SPANS, PHASE_STAGES, SyncReport
from verl_sync_plugin.timeline.charts import seconds, ticks
from verl_sync_plugin.timeline.figures import COLUMNS

GIB = 2**30
VOID = {"meta", "br", "line", "rect"}
# What version 0.1.0 wrote; the fields that came later are left out
OLD = {
    "event": "sync_report",
    "global_steps": 0,
    "manager": "FSDP2SGLangShardingManager",
    "stages": {"sleep": 0.2, "resume_weights": 0.0625, "update_weights": 7.5, "resume_kv": 0.03125, "pack": 0.25},
    "nbytes": 15_231_233_024,
    "buckets": 25,
    "bucket_bytes": 512 << 20,
    "tensors": 339,
    "peak_device_bytes": GIB,
    "device_used_bytes": {"asleep": 20 * GIB, "weights": 27 * GIB, "synced": 28 * GIB, "awake": 68 * GIB},
    "coverage_expected": 199,
    "coverage_missing": 0,
    "own_bytes": 7_000_000_000,
    "peer_bytes": 8_000_000_000,
    "gathered_bytes": 0,
    "direct_bytes": 0,
}


def line(step: int, rank: int = 0, pid: int = 7, **changes: Any) -> dict[str, Any]:
    """A report of this version: of a sync that read in place, 10 s after the one before."""
    start = 1000.0 + 10 * step
    report = SyncReport(
        step,
        "FSDP2SGLangShardingManager",
        {"sleep": 0.125, "update_weights": 0.25 + step / 16 + rank / 64, "resume_kv": 0.03125, "engine_load": 0.125},
        nbytes=16_000_000_000,
        tensors=339,
        coverage_expected=199,
        own_bytes=6_000_000_000,
        peer_bytes=2_000_000_000,
        direct_bytes=8_000_000_000,
        delivery="direct",
        hashed_tensors=339,
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
    """A page as a tree that is checked on the way: every start has its end."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.section = ""
        self.attributes: list[tuple[str, str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self.cells: dict[str, list[list[str]]] = {}
        self._ids: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "section":
            self.section = given.get("id", "")
        self.attributes.append((self.section, tag, given))
        if tag == "table":
            self._table = given.get("id", "")
        if tag == "tr":
            self.cells.setdefault(self._table, []).append([])
        if tag in ("td", "th"):
            self.cells[self._table][-1].append("")
        if tag not in VOID:
            self.open.append(tag)
            self._ids.append(given.get("id", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in VOID, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._ids.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._ids):
            self.texts[name] = self.texts.get(name, "") + data
        if "td" in self.open or "th" in self.open:
            self.cells[self._table][-1][-1] += data

    def parts(self, section: str, tag: str, value: str) -> list[tuple[str, float]]:
        """(part, value) of what is drawn in a section."""
        return [
            (given["data-part"], float(given[value]))
            for where, name, given in self.attributes
            if where == section and name == tag and value in given and "data-part" in given
        ]

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
    (said,) = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    return said


class TestPage:
    def test_stands_alone(self, tmp_path: Path) -> None:
        text, page = page_of(written(tmp_path, *(line(step) for step in range(3))))
        assert "<script" not in text and "http" not in text.lower() and "@import" not in text and "url(" not in text
        assert not [given for _, tag, given in page.attributes if tag in ("img", "link", "iframe") or "src" in given]
        assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text

    def test_seconds_by_stage_are_those_of_the_file(self, tmp_path: Path) -> None:
        lines = [line(step) for step in range(5)]
        _, page = page_of(written(tmp_path, *lines))
        stages = [report["stages"] for report in lines]
        first = {stage: value for stage, value in stages[0].items() if stage in PHASE_STAGES}
        assert dict(page.parts("first", "i", "data-seconds")) == first
        drawn = page.parts("later", "rect", "data-seconds")
        assert drawn == [(stage, each[stage]) for each in stages[1:] for stage in PHASE_STAGES if stage in each]
        phases = [sum(each.get(stage, 0) for stage in PHASE_STAGES) for each in stages]
        assert page.texts["first-phase"] == seconds(phases[0]) == "0.41 s"
        assert page.texts["median-phase"] == seconds(statistics.median(phases[1:]))
        assert page.texts["slowest-phase"] == seconds(max(phases[1:]))
        assert [cells[0] for cells in page.cells["syncs"]] == ["step", "0", "1", "2", "3", "4"]

    def test_columns_are_as_high_as_their_seconds(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, *(line(step) for step in range(4))))
        boxes = [given for where, tag, given in page.attributes if where == "later" and tag == "rect"]
        heights = {round(float(box["height"]) / float(box["data-seconds"]), 2) for box in boxes}
        assert len(heights) == 1 and len(boxes) == 9
        assert all(0 <= float(box["y"]) <= 100 for box in boxes)

    def test_inside_a_sync_as_measured(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, line(0)))
        spans = {
            given["data-stage"]: (float(given["data-start"]), float(given["data-seconds"]))
            for where, _, given in page.attributes
            if where == "first" and "data-stage" in given
        }
        assert spans == {
            "update_weights": (0, 0.25), "connect": (0.0625, 0.0625), "engine_load": (0.125, 0.125),
            "resume_kv": (1.5, 0.03125),
        }  # fmt: skip

    def test_memory_by_stage_adds_up(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, line(0)))
        drawn = [(part, value / GIB) for part, value in page.parts("memory", "i", "data-bytes")]
        assert drawn == [
            ("trainer", 40), ("others", 10),
            ("trainer", 40), ("staging", 1), ("others", 10), ("weights", 7),
            ("trainer", 40), ("staging", 1), ("others", 10), ("weights", 7),
            ("trainer", 38), ("others", 10), ("weights", 7),
            ("trainer", 38), ("others", 10), ("weights", 7), ("kv_cache", 40),
        ]  # fmt: skip
        assert page.row("memory-numbers", "staging memory held") == ["1.0 GiB"]

    def test_bytes_by_way(self, tmp_path: Path) -> None:
        staged = line(0, direct_bytes=0, gathered_bytes=500, delivery="gathered")
        _, page = page_of(written(tmp_path, staged, line(1)))
        assert page.parts("bytes", "rect", "data-bytes") == [
            ("own_staged", 6e9), ("peer_staged", 2e9), ("gathered", 500), ("own_direct", 6e9), ("peer_direct", 2e9),
        ]  # fmt: skip
        assert page.row("bytes-numbers", "delivery") == ["gathered", "direct"]
        assert page.row("bytes-numbers", "of what was read: in place, nothing staged") == ["0 B", "8.00 GB"]

    def test_proofs(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, line(0), line(1)))
        assert "Every sync wrote every parameter" in page.texts["proofs"] and "in 2 of 2 syncs" in page.texts["proofs"]
        assert page.row("proof-numbers", "first sync") == ["199", "0", "339", "339"]
        _, page = page_of(written(tmp_path, line(0), line(1, coverage_missing=3, hashed_tensors=0)))
        assert "In 1 syncs, from step 1 on" in page.texts["proofs"] and "in 1 of 2 syncs" in page.texts["proofs"]
        assert page.texts["covered"] == "196 of 199"

    def test_the_slowest_of_several_ranks_is_drawn_and_all_are_named(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, *(line(step, rank) for step in range(3) for rank in (0, 8))))
        drawn = [value for part, value in page.parts("later", "rect", "data-seconds") if part == "update_weights"]
        assert drawn == [line(step, 8)["stages"]["update_weights"] for step in (1, 2)]
        rows = page.cells["reporter-numbers"][1:]
        assert [row[0].split(", ")[1] for row in rows] == ["rank 0 on node0", "rank 8 on node1"]
        assert {row[2] for row in rows} == {"3"}

    def test_many_syncs_share_columns_and_nothing_is_lost(self, tmp_path: Path) -> None:
        lines = [line(step) for step in range(1000)]
        _, page = page_of(written(tmp_path, *lines))
        columns = [given for where, tag, given in page.attributes if where == "later" and tag == "g"]
        assert len(columns) <= COLUMNS and columns[-1]["data-step"] == "991 to 999"
        assert columns[0]["data-step"] == "1 to 9"
        sleep = [value for part, value in page.parts("later", "rect", "data-seconds") if part == "sleep"]
        assert set(sleep) == {0.125} and "mean of several syncs" in page.texts["later"]
        assert len(page.cells["syncs"]) == 201

    def test_texts_of_the_file_are_no_markup(self, tmp_path: Path) -> None:
        spans = [('"><script>', 1.0, 1.0)]
        text, _ = page_of(written(tmp_path, line(0, manager="<script>alert(1)</script>", spans=spans)))
        assert "<script" not in text

    def test_without_a_gpu(self, tmp_path: Path) -> None:
        empty: dict[str, int] = {}
        _, page = page_of(written(tmp_path, line(0, device_used_bytes=empty, trainer_reserved_bytes=empty)))
        assert "the run had no GPU" in page.texts["memory"]


class TestReading:
    def test_a_file_of_an_older_version(self, tmp_path: Path) -> None:
        _, page = page_of(written(tmp_path, OLD, {**OLD, "global_steps": 1, "direct_bytes": 15_000_000_000}))
        assert page.texts["first-phase"] == "7.79 s" and page.texts["covered"] == "199 of 199"
        drawn = [(part, value / GIB) for part, value in page.parts("memory", "i", "data-bytes")][:6]
        assert drawn == [("others", 20), ("others", 20), ("weights", 7), ("others", 21), ("weights", 7), ("others", 21)]
        assert page.row("memory-numbers", "staging memory held") == ["not told"] * 2
        assert page.row("proof-numbers", "first sync") == ["199", "0", "not told", "339"]
        assert "do not say whether hashes were compared" in page.texts["proofs"]
        assert "not told by the report file" in page.texts["made-from"]

    def test_what_a_leader_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / "reports.jsonl"))
        for step in range(2):
            report = SyncReport.begun(step, "M", 3, "CPU")
            with report.stage("update_weights"), report.stage("pack"):
                pass
            write_report(report)
        lines = [json.loads(text) for text in (tmp_path / "reports.jsonl").read_text().splitlines()]
        assert "versions" in lines[0] and "versions" not in lines[1]
        _, page = page_of(tmp_path)
        assert f"torch {lines[0]['versions']['torch']}" in page.texts["made-from"]
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
        assert len(page.cells["syncs"]) == 4 and "Run 3 of 3" in page.texts["made-from"]
        _, page = page_of(file, "--run", "2")
        assert [cells[0] for cells in page.cells["syncs"][1:]] == ["4", "5"]
        assert "use --run 1 to 3" in refused(capsys, str(file), "--run", "4")

    def test_a_line_cut_short_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _, page = page_of(written(tmp_path, line(0), json.dumps(line(1))[:70]))
        assert "reports.jsonl:2" in page.texts["made-from"] and "reports.jsonl:2" in capsys.readouterr().out

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


class TestTrace:
    def trace(self, tmp_path: Path, *options: str) -> dict[str, Any]:
        lines = [line(step, rank, spans_left_out=2) for step in range(3) for rank in (0, 8)]
        out = tmp_path / "trace.json"
        page_of(written(tmp_path, *lines), "--trace", str(out), *options)
        loaded: dict[str, Any] = json.loads(out.read_text())
        return loaded

    def test_is_in_chromes_format(self, tmp_path: Path) -> None:
        trace = self.trace(tmp_path)
        assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["step"] == 2
        for event in trace["traceEvents"]:
            assert event["ph"] in ("M", "X") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
            if event["ph"] == "M":
                assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            else:
                assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"] in ("phase", "detail")

    def test_events_are_where_the_spans_are(self, tmp_path: Path) -> None:
        trace = self.trace(tmp_path, "--step", "1")
        events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
        found = {event["name"]: (event["ts"], event["dur"], event["tid"]) for event in events}
        assert found == {
            "update_weights": (0, 312500, 1), "connect": (62500, 62500, 1), "engine_load": (125000, 125000, 2),
            "resume_kv": (1500000, 31250, 1),
        }  # fmt: skip
        assert trace["otherData"]["spans_left_out"] == 4
        assert set(trace["otherData"]["sleep_seconds"].values()) == {0.125}

    def test_ranks_of_several_hosts_are_aligned(self, tmp_path: Path) -> None:
        early, late = line(0), line(0, 8)
        late["origin"]["epoch"] += 0.5
        page_of(written(tmp_path, early, late), "--trace", str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert [event["ts"] for event in events if event["name"] == "connect"] == [62500, 562500]

    def test_a_step_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file, out = str(written(tmp_path, line(0))), str(tmp_path / "trace.json")
        assert "there are steps 0 to 0" in refused(capsys, file, "--trace", out, "--step", "3")
        assert "--trace OUT.json" in refused(capsys, file, "--step", "3")
        file = str(written(tmp_path, OLD))
        assert "does not say when stages began" in refused(capsys, file, "--trace", out)
        assert not Path(out).exists()


def test_spans_nest_and_are_bounded() -> None:
    report = SyncReport.begun(1, "M", 0, "CPU")
    with report.stage("update_weights"):
        for _ in range(MAX_SPANS + 5):
            with report.stage("pack"):
                assert report.under_way == ["update_weights", "pack"]
    assert report.under_way == [] and len(report.spans) == MAX_SPANS and report.spans_left_out == 6
    assert {name for name, *_ in report.spans} == {"pack"}
    report = SyncReport()
    with report.stage("update_weights"), report.stage("pack"):
        pass
    (_, inner, short), (_, outer, long) = report.spans
    assert outer <= inner and inner + short <= outer + long + 2e-6


def test_what_comes_before_a_sync_is_part_of_it() -> None:
    around, report = SyncReport(), SyncReport()
    with around.stage("before"), around.stage("update_weights"):
        pass
    with report.stage("update_weights"):
        pass
    own = report.stages["update_weights"]
    report.put_before(around)
    assert list(report.stages) == ["update_weights", "before"]
    assert report.stages["update_weights"] == own + around.stages["update_weights"]
    assert [name for name, *_ in report.spans] == ["update_weights", "before", "update_weights"]


@pytest.mark.parametrize("top", [0.0, 1e-6, 0.07, 0.9, 1.0, 7.73, 99.0, 1.6e10])
def test_ticks_are_round_and_reach_the_top(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0 and found[-1] >= top and 2 <= len(found) <= 6
    assert all(re.fullmatch(r"[1-9](\.\d)?e[+-]\d+", f"{found[1]:.1e}") for _ in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.73, "7.73 s"), (0.1, "0.10 s"), (0.0256, "26 ms"), (0.00131, "1.31 ms"), (3.1e-5, "31 µs"), (0, "0 s")],
)
def test_seconds_for_people(value: float, text: str) -> None:
    assert seconds(value) == text
