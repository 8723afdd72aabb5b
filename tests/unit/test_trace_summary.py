# SPDX-License-Identifier: Apache-2.0
"""The summary of a profile, from traces with a device in them: the smoke run has none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace_summary


def event(cat: str, name: str, start: float, seconds: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "pid": 1, "tid": thread}


def write(path: Path, base_seconds: int, events: list[dict[str, Any]]) -> Path:
    trace = {"baseTimeNanoseconds": base_seconds * 10**9, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    with gzip.open(path, "wt") as out:
        json.dump(trace, out)
    return path


def summary(tmp_path: Path) -> dict[str, Any]:
    trainer = [
        event("user_annotation", "sync", 10, 10),
        event("user_annotation", "sync/pack", 11, 4),
        event("cpu_op", "aten::copy_", 11, 2),
        event("cuda_runtime", "cudaLaunchKernel", 11.5, 0.5),
        event("kernel", "pack_kernel", 12, 2, thread=7),
        event("kernel", "pack_kernel", 19, 4, thread=7),
        event("kernel", "before", 1, 2, thread=7),
        event("python_function", "noise", 11, 1),
    ]
    # the engine's trace counts from another second, by the same clock
    engine = [event("kernel", "copy_kernel", 3, 3, thread=7), event("gpu_memcpy", "Memcpy DtoD", 5.5, 1, thread=8)]
    paths = write(tmp_path / "t.gz", 1_790_857_026, trainer), write(tmp_path / "e.gz", 1_790_857_036, engine)
    return trace_summary.summarize(paths[0], [paths[1]])


def test_device_is_busy_while_any_process_uses_it(tmp_path: Path) -> None:
    found = summary(tmp_path)
    # trainer 12-14 and 19-20 (the window's end), engine 13-16 and 15.5-16.5
    assert found["seconds"] == pytest.approx(10)
    assert found["device_busy_seconds"] == pytest.approx(5.5)
    assert found["device_busy_share"] == pytest.approx(0.55)
    busy = {name: process["device_busy_seconds"] for name, process in found["processes"].items()}
    assert busy == pytest.approx({"trainer": 3, "engine 0": 3.5})
    stage, rest = found["stages"]
    assert rest["seconds"] == pytest.approx(6) and rest["device_busy_seconds"] == pytest.approx(2.5)
    assert stage["name"] == "pack" and stage["seconds"] == pytest.approx(4)
    assert stage["device_busy_seconds"] == pytest.approx(3), "12 to 15, by both processes"


def test_time_by_name_leaves_out_what_ran_inside_and_outside(tmp_path: Path) -> None:
    trainer = summary(tmp_path)["processes"]["trainer"]
    assert [(row["name"], row["count"], row["seconds"]) for row in trainer["host"]] == [
        ("aten::copy_", 1, pytest.approx(1.5)),
        ("cudaLaunchKernel", 1, pytest.approx(0.5)),
    ]
    assert [(row["name"], row["count"]) for row in trainer["device"]] == [("pack_kernel", 2)]


def test_text_shows_busy_and_idle(tmp_path: Path) -> None:
    profile = {"variant": "plugin", "bucket_mb": 512, "unprofiled_seconds": 0.02, **summary(tmp_path)}
    text = "\n".join(trace_summary.markdown(profile))
    assert "device busy 55%, idle 45%" in text
    assert "| pack | 1 | 4000.00 ms | 3000.00 ms |" in text
    assert "| engine 0: device | times | seconds |" in text and "| copy_kernel | 1 | 3000.00 ms |" in text


def test_trace_without_a_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no mark"):
        trace_summary.summarize(write(tmp_path / "t.gz", 0, []), [])
