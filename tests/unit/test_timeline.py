# SPDX-License-Identifier: Apache-2.0
"""``verl-sync report``: what its page shows, beside the report file that it is made from."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from report_pages import GIB, line, page_of, written
from verl_sync_plugin.report.sync_report import PHASE_STAGES
from verl_sync_plugin.timeline.charts import seconds, ticks
from verl_sync_plugin.timeline.figures import COLUMNS


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
        assert page.row("proof-numbers", "first sync") == ["199", "0", "339", "337", "2", "339"]
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
