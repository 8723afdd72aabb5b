# SPDX-License-Identifier: Apache-2.0
"""Checks what a sync reports, and what ``verl-sync report`` makes of old versions, several runs and broken files."""

import codecs
import html
import json
import re
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fresh_process import python
from verl_sync_plugin import report as reports
from verl_sync_plugin.cli import main
from verl_sync_plugin.report import MAX_SPANS, PHASE_STAGES, REPORT_FILE_VARIABLE, SyncReport, progress


def report(**changes: Any) -> SyncReport:
    stages = {"sleep": 0.5, "resume_weights": 0.25, "update_weights": 2.0, "resume_kv": 0.125, "pack": 9.0}
    values: dict[str, Any] = {"global_steps": 3, "stages": stages, "nbytes": 4_000_000_000, "buckets": 2, "tensors": 7}
    return SyncReport(**(values | changes))


def test_stages_add_up_also_when_they_fail_and_spans_nest_and_are_bounded() -> None:
    measured = SyncReport.begun(1, "M", rank=0)
    for _ in range(2):
        with pytest.raises(RuntimeError), measured.stage("update_weights"), measured.stage("pack"):
            assert measured.under_way == ["update_weights", "pack"]
            time.sleep(0.01)
            raise RuntimeError
    assert 0.02 <= measured.stages["pack"] <= measured.stages["update_weights"] < 0.5 and measured.under_way == []
    (_, inner, short), (_, outer, long) = measured.spans[:2]
    assert outer <= inner and inner + short <= outer + long + 2e-6
    for _ in range(MAX_SPANS):
        measured.note_stage("load", 0.0, 1.0)
    assert len(measured.spans) == MAX_SPANS and measured.spans_left_out == 4


def test_the_phase_is_the_sum_of_its_stages_and_of_what_came_before() -> None:
    assert report().phase_seconds == 2.875 and SyncReport().phase_seconds == 0.0
    assert set(report().stages) - set(PHASE_STAGES) == {"pack"}
    later, around = report(), SyncReport()
    for name, seconds in (("before", 1.0), ("update_weights", 2.0), ("offload", 4.0)):
        around.note_stage(name, 0.0, seconds)
    later.put_before(around)
    assert later.phase_seconds == 9.875 and later.stages["update_weights"] == 4.0
    assert [name for name, *_ in later.spans] == ["before", "update_weights", "offload"]
    assert SyncReport(**later.as_dict()) == later, "it survives the wire"


def test_the_line_fits_a_terminal() -> None:
    said = report(delivery="in place", hashed_tensors=7).line()
    assert said == "sync of step 3: 2.875 s, 7 tensors, 4.00 GB, in place, hashed 7"
    adapter = report(nbytes=230_000, tensors=0)
    assert adapter.line() == "sync of step 3: 2.875 s, 0 tensors, 0.23 MB, the adapter alone, hashed 0"
    many = {"global_steps": 10000, "tensors": 18867, "nbytes": 61 * 10**9, "verified_tensors": 18867}
    longest = report(**many, delivery="broadcast")
    assert longest.line().endswith("GB, broadcast, verified 18867") and len(longest.line()) <= 100
    assert report(verified_tensors=5, not_comparable=2).line().endswith("verified 5, 2 not comparable")


def test_of_several_replicas_bytes_add_up_and_the_worst_of_the_rest_counts() -> None:
    slow = report(stages={"update_weights": 3.0, "resume_kv": 0.5})
    assert reports.timing_of([report().as_dict(), slow.as_dict()]) == {
        "sync/pack": 9.0, "sync/resume_kv": 0.5, "sync/resume_weights": 0.25, "sync/sleep": 0.5,
        "sync/update_weights": 3.0, "sync/phase": 3.5,
    }  # fmt: skip
    other = report(nbytes=1_000_000_000, buckets=5, peak_host_bytes=8, delivery="in place", bucket_bytes=6)
    one = report(verified_tensors=5, not_comparable=2, replayed_tensors=7, coverage_expected=11)
    found = reports.metrics_of([one.as_dict(), other.as_dict()])
    expected = {
        "active": 1, "bytes": 5e9, "buckets": 5, "bucket_bytes": 6, "tensors": 7,
        "peak_host_bytes": 8, "coverage_expected": 11, "verified_tensors": 0,
        "not_comparable": 2, "replayed_tensors": 0, "weight_version": 3,
    }  # fmt: skip
    assert {name: found[f"sync/{name}"] for name in expected} == expected
    zeros = set(found) - {f"sync/{name}" for name in expected}
    assert len(zeros) == 5 and not any(found[name] for name in zeros), zeros


def test_a_long_sync_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports.EVERY_SECONDS == 5.0
    monkeypatch.setattr(reports, "EVERY_SECONDS", 0.15)
    for speaks, seconds, loaded in ((True, 0.0, 0), (False, 0.4, 0), (True, 0.55, 1), (True, 0.55, 2)):
        measured = report(delivery="in place" * (loaded == 2), spans=[("plan", 0.0, 0.1), ("engine_load", 0.0, 0.1)])
        with pytest.raises(RuntimeError), progress(measured, speaks), measured.stage("connect"):
            time.sleep(seconds)
            raise RuntimeError
        said = capsys.readouterr().out.splitlines()
        assert bool(said) == bool(loaded) and len(said) <= 4, said
        assert all(f"0 s so far, {loaded} of 2 buckets loaded, now in connect" in line for line in said), said
    assert "sync progress" not in {thread.name for thread in threading.enumerate()}


def line(step: int, rank: int = 0, pid: int = 7, **changes: Any) -> dict[str, Any]:
    """A report of this version: of a sync that read in place, 10 s after the one before."""
    start = 1000.0 + 10 * step
    stages = {
        "sleep": 0.125,
        "update_weights": 0.25 + step / 16 + rank / 64,
        "resume_kv": 0.03125,
        "engine_load": 0.125,
    }
    report = SyncReport(
        step, "FSDP2SGLangShardingManager", "in place", stages, nbytes=16_000_000_000, tensors=339, hashed_tensors=339,
        verified_tensors=339,
        origin={"host": f"node{rank // 8}", "pid": pid, "rank": rank, "device": "NVIDIA H200", "epoch": 1.79e9,
                "ranks": 8, "engine": "SGLang", "trainer": "FSDP2", "model": "Tiny-7B"},
        spans=[("connect", start + 0.0625, 0.0625), ("engine_load", start + 0.125, 0.125),
               ("update_weights", start, 0.25 + step / 16), ("resume_kv", start + 1.5, 0.03125)],
    )  # fmt: skip
    return {"event": "sync_report", **report.as_dict(), **changes}


class Page:
    """The cells of a page's tables by the table's id, and its text without markup."""

    def __init__(self, markup: str) -> None:
        self.markup, self.text = markup, bare(markup)
        tables = re.findall(r'<table[^>]*id="(\w+)"[^>]*>(.*?)</table>', markup, re.DOTALL)
        self.cells = {
            name: [list(map(bare, re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row))) for row in table.split("<tr>")[1:]]
            for name, table in tables
        }

    def row(self, table: str, heading: str) -> list[str]:
        (found,) = [cells for cells in self.cells[table] if cells[0] == heading]
        return found[1:]


def bare(markup: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", markup))


def written(folder: Path, *lines: Any, name: str = "reports.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return file


def page_of(file: Path, *options: str) -> Page:
    assert main(["report", str(file), *options]) == 0
    return Page(((file if file.is_dir() else file.parent) / "sync-report.html").read_text(encoding="utf-8"))


def test_figures_are_those_of_the_file_and_nothing_points_elsewhere(tmp_path: Path) -> None:
    lines = [line(step) for step in range(5)]
    page = page_of(written(tmp_path, *lines))
    assert "<script" not in page.markup and "@import" not in page.markup and 'name="viewport"' in page.markup
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page.markup)
    assert links and all(target.startswith("#") for pair in links for target in pair if target)
    assert "Tiny-7B: FSDP2 → SGLang on 8 × NVIDIA H200, 2026-09-21" in page.text
    times = [sum(each["stages"].get(stage, 0) for stage in PHASE_STAGES) for each in lines]
    assert f"5 syncs, median {statistics.median(times[1:]):.2f} s, slowest {times[-1]:.2f} s (step 4), " in page.text
    assert f"first {times[0]:.2f} s; all verified." in page.text
    assert page.cells["syncs"][0] == ["step", "phase", "sleep", "update_weights", "resume_kv", "slowest reporter"]
    assert page.row("syncs", "2")[:4] == ["0.53 s", "0.12 s", "0.38 s", "31 ms"]
    assert page.row("numbers", "nbytes") == ["16.00 GB"] * 2 and page.row("numbers", "delivery") == ["in place"] * 2
    assert page.row("numbers", "phase") == ["0.41 s", "0.56 s"]
    for drawn in ("engine_load  0.12 s", "step 0, the first", "step 4, the slowest"):
        assert drawn in page.text


@pytest.mark.parametrize(("changes", "said"), [
    ({"coverage_missing": 3}, "bad: 1 from step 1 on left parameters of the engine unwritten"),
    ({"verified_tensors": 0}, "good: all hashed, 1 verified in the engine"),
    ({"verified_tensors": 0, "hashed_tensors": 0}, "good: 1 hashed, 1 verified in the engine"),
])  # fmt: skip
def test_the_verdict_says_what_is_wrong_and_what_is_proven(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    changed = line(1, manager="<script>", spans=[('"><script>', 1.0, 1.0)], **changes)
    page = page_of(written(tmp_path, line(0), changed))
    level, _, words = said.partition(": ")
    assert f'<p class="{level}">' in page.markup and f"; {words}." in page.text and "<script" not in page.markup


def test_the_slowest_of_several_ranks_counts(tmp_path: Path) -> None:
    """Covers two hosts with a file each, in a folder with a file of somebody else, next to another run."""
    (tmp_path / "inner").mkdir()
    written(tmp_path, *(line(step, 8) for step in range(3)), name="a.jsonl")
    written(tmp_path / "inner", *(line(step, 0) for step in range(3)), name="b.jsonl")
    written(tmp_path, {"event": "another"}, name="c.jsonl")
    slower = written(tmp_path, *(line(step, 16) for step in range(3)), name="other")
    page = page_of(tmp_path, "--against", str(slower))
    assert [cells[0] for cells in page.cells["syncs"][1:]] == ["0", "1", "2"]
    assert page.row("numbers", "update_weights") == ["0.38 s", "0.47 s", "0.50 s", "0.59 s"]
    assert "3 syncs, median 0.75 s" in page.text and "median of the other run" in page.text
    found = page.row("syncs", "2")
    assert found[2] == f"{line(2, 8)['stages']['update_weights']:.2f} s" and "rank 8 on node1" in found[-1]


def test_many_syncs_share_bars_and_the_worst_is_drawn(tmp_path: Path) -> None:
    lines = [line(step) for step in range(500)]
    lines[250]["stages"]["sleep"] = 600.0
    page = page_of(written(tmp_path, *lines))
    assert "each bar the mean of 5" in page.text and "slowest of a bar" in page.text
    assert page.markup.count(f"{lines[250]['stages']['update_weights'] + 600.03125:.2f} s, step 250<") == 1
    assert len(page.cells["syncs"]) == 501 and len(page.markup) < 2_000_000


def test_a_leaders_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for step, folder in ((0, "nowhere/"), (0, ""), (1, "")):
        monkeypatch.setenv(REPORT_FILE_VARIABLE, str(tmp_path / f"{folder}reports.jsonl"))
        report = SyncReport.begun(step, "M", rank=3)
        with report.stage("update_weights"), report.stage("pack"):
            pass
        reports.write_report(report)
    assert capsys.readouterr().out.count("is not written") == 1
    lines = [json.loads(text) for text in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert "versions" in lines[0] and "versions" not in lines[1]
    page = page_of(tmp_path)
    assert f"torch {lines[0]['versions']['torch']}" in page.text and "Weight syncs on ? × CPU, 20" in page.text
    assert page.row("syncs", "1")[-1].startswith("M, rank 3 on ")


def test_of_several_runs_in_a_file_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [line(step) for step in range(5)], [line(step, pid=8) for step in range(4, 6)]
    broken = json.dumps(line(3))[:70], json.dumps(line(3, stages={"sleep": float("nan")}))
    file = written(tmp_path, *first, *second, *(line(step, pid=9) for step in range(3)), *broken)
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    page = page_of(file)
    assert len(page.cells["syncs"]) == 4 and "run 3 of 3" in page.text
    named = f"not JSON: {file}:11, {file}:12"
    assert named in page.text and named in capsys.readouterr().out, "a line cut short, and one with NaN"
    page = page_of(file, "--run", "2")
    assert [cells[0] for cells in page.cells["syncs"][1:]] == ["4", "5"]


HOW_TO = f"env_vars.{REPORT_FILE_VARIABLE}="
GOOD = json.dumps(line(0)).encode()


@pytest.mark.parametrize(("content", "options", "said"), [
    (None, [], f"no such file or folder; .*{HOW_TO}"),
    (b"\x00\xff\x93NUMPY", [], f"no sync reports in it; .*{HOW_TO}"),
    (b'{"event": "another"}\n', [], "no sync reports in it"),
    (b'\n{"event": "sync_report"}\n', [], "file:2: .* `origin`; remove that line, .*of an old version"),
    *(
        (GOOD + b"\n" + re.sub(*change, GOOD), [], f"file:2: {said}; remove that line")
        for change, said in (
            ((b'"rank": 0, ', b""), r"Object missing required field `rank` - at `\$.origin`"),
            ((b'"device": "[^"]*"', b'"device": ""'), r".* - at `\$.origin.device`"),
            ((b'"epoch": [^,]*', b'"epoch": "x"'), r"Expected `float`, got `str` - at `\$.origin.epoch`"),
            ((b'"epoch": [^,]*', b'"epoch": 1e300'), r".* - at `\$.origin.epoch`"),
            ((b'"spans": .*]', b'"spans": []'), r".* - at `\$.spans`"),
        )
    ),
    (GOOD, ["--out", "{}/nowhere/page.html"], "name another place"),
    (GOOD, ["--run", "2"], "use --run 1 to 1"),
    (GOOD, [], "pip install matplotlib"),
], ids=lambda value: str(value)[-40:])  # fmt: skip
def test_what_cannot_be_done_is_one_line_with_a_remedy(
    content: bytes | None, options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    if "matplotlib" in said:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "file"), *(option.format(tmp_path) for option in options)])
    (text,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verl-sync report: ")]
    assert ended.value.code == 2 and re.search(said, text), text
    assert {each.name for each in tmp_path.iterdir()} <= {"file"}


def test_needs_no_torch_and_the_doctor_starts_without_it(tmp_path: Path) -> None:
    code = """
        import sys
        from verl_sync_plugin.cli import parser_of
        parser_of(["doctor"])
        assert "verl_sync_plugin.report" not in sys.modules
        parser_of([])
        assert not {"torch", "verl", "transformers"} & set(sys.modules)
        """
    assert python(tmp_path, code).returncode == 0
