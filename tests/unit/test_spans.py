# SPDX-License-Identifier: Apache-2.0
"""When the stages of a sync ran: what reports keep of it, and the trace in Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report_pages import line, page_of, refused, written


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
        file = str(written(tmp_path, line(0, spans=[])))
        assert "does not say when stages began" in refused(capsys, file, "--trace", out)
        assert not Path(out).exists()
