# SPDX-License-Identifier: Apache-2.0
"""Traces of one sync after the measured ones: torch's profiler in the trainer, SGLang's own in its schedulers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import gauges, trace_summary

if TYPE_CHECKING:
    from benchmarks.transfer import rig

SUFFIX = ".trace.json.gz"


@contextmanager
def marked_stages() -> Iterator[None]:
    """Marks the stages of the plugin's report in the trace."""
    from torch.profiler import record_function

    from verl_sync_plugin.report import SyncReport

    original = SyncReport.stage

    @contextmanager
    def stage(self: SyncReport, name: str) -> Iterator[None]:
        with record_function(f"{trace_summary.STAGE}{name}"), original(self, name):
            yield

    with mock.patch.object(SyncReport, "stage", stage):
        yield


@contextmanager
def _traced_engine(server: Any, folder: Path, prefix: str, cuda: bool) -> Iterator[None]:
    activities = ["CPU", "GPU"] if cuda else ["CPU"]
    # stacks and shapes would cost more time than the sync takes
    body = {"output_dir": str(folder), "activities": activities, "with_stack": False, "record_shapes": False}
    server.ask("POST", "/start_profile", {**body, "profile_prefix": prefix})
    try:
        yield
    finally:
        server.ask("POST", "/stop_profile")


def _traced_sync(way: Any, bench: rig.Rig, folder: Path, stem: str) -> tuple[Path, list[Path]]:
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = bench.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    engine = _traced_engine(bench.server, folder, f"{stem}-engine", cuda)
    with engine, profile(activities=activities) as profiler, marked_stages():
        gauges.synchronize()
        with record_function(trace_summary.WINDOW):
            way.sync()
            gauges.synchronize()
    trainer = folder / f"{stem}-trainer{SUFFIX}"
    profiler.export_chrome_trace(str(trainer))
    engines = []
    for rank, path in enumerate(sorted(folder.glob(f"{stem}-engine-*{SUFFIX}"))):
        engines.append(path.rename(folder / f"{stem}-engine{rank}{SUFFIX}"))  # SGLang's name has the time in it
    return trainer, engines


def take(way: Any, bench: rig.Rig, folder: Path, stem: str) -> dict[str, Any]:
    """Traces one sync of ``way`` into ``folder`` and summarizes it.

    Raises:
        RuntimeError: SGLang wrote no trace.
    """
    folder = folder.resolve()  # the server's working directory is its own
    folder.mkdir(parents=True, exist_ok=True)
    # The first traced sync pays for the profilers' start; the second one overwrites its traces
    for _ in range(2):
        trainer, engines = _traced_sync(way, bench, folder, stem)
    if not engines:
        raise RuntimeError("SGLang wrote no trace")
    return trace_summary.summarize(trainer, engines)


def write(folder: Path, result: dict[str, Any], profiles: list[dict[str, Any]]) -> None:
    """``CASE-profile.json`` and ``.md``: what was measured where, and the summaries."""
    told = {name: result[name] for name in ("case", "machine", "versions", "commit", "date", "command")}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['case']}-profile.json"
    path.write_text(json.dumps({**told, "profiles": profiles}, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {result['case']}, commit {result['commit'][:12]}", ""]
    for profile in profiles:
        lines += trace_summary.markdown(profile)
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
