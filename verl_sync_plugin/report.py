# SPDX-License-Identifier: Apache-2.0
"""Reports the cost of a sync: one ``SyncReport`` per sync, into verl's metrics, the log and a file."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_sync_plugin import compat
from verl_sync_plugin.log import say

# In the order of a training step; "phase" is their sum. "before" and "after" make room in device memory, "barrier" is
# the wait for the other ranks to have done so. Only our worker (hooks/worker.py) times these three and "offload"; in
# verl's own they are in timing_s/update_weights alone. "resume_weights" is the wait for the engine's weights, without
# what is packed meanwhile, which counts in "update_weights".
PHASE_STAGES = ("sleep", "before", "resume_weights", "update_weights", "offload", "after", "barrier", "resume_kv")
# All other stages are parts of update_weights, on the reporting rank; "engine_load" is the engine's time and overlaps
# with the others. "open" makes the sharding manager, in the first sync only.
MAX_SPANS = 1024  # of one sync, some 40 bytes each in the report file
REPORT_FILE_VARIABLE = "VERL_SYNC_REPORT_FILE"
EVENT = "sync_report"  # marks our lines in that file
EVERY_SECONDS = 5.0  # between lines about a sync that takes long
ACTIVE = "sync/active"  # the metric that stock verl never has: 1 in every step of a run whose weights the plugin moves
# How reports of several replicas become one metric
METRICS: dict[Callable[[Iterator[float]], float], tuple[str, ...]] = {
    sum: ("bytes",),
    max: (
        "buckets", "bucket_bytes", "tensors", "weight_version", "emptied_caches", "released_bytes", "peak_host_bytes",
        "coverage_expected", "coverage_missing", "activation_bytes", "not_comparable",
    ),
    min: ("in_place", "verified_tensors", "replayed_tensors"),
}  # fmt: skip

_said: set[str] = set()  # what this process has said once


@dataclass
class SyncReport:
    """One sync as one trainer rank saw it; all sizes in bytes."""

    global_steps: int = -1  # verl's weight version, -1 when verl gave none
    manager: str = ""  # class name of the sharding manager that ran
    delivery: str = ""  # of the base weights; empty when none travelled
    stages: dict[str, float] = field(default_factory=dict)  # seconds by name
    nbytes: int = 0  # of all buckets; an engine rank reads what it needs of them
    buckets: int = 0  # number of transfers
    bucket_bytes: int = 0  # the size that the user sets (of a separate rollout, a slot's); 0 when no base travelled
    tensors: int = 0  # number of HF tensors
    peak_device_bytes: int = 0  # most device memory that this rank allocated beyond what it held before
    device_used_bytes: dict[str, int] = field(default_factory=dict)  # of all processes, by moment
    emptied_caches: int = 0  # how often the trainer handed cached device memory back: before, after, or both
    released_bytes: int = 0  # how much that was
    peak_host_bytes: int = 0  # growth of this rank's peak resident set
    coverage_expected: int = 0  # parameters and persistent buffers of the engine's model
    coverage_missing: int = 0  # how many of them a sync does not write completely
    replayed_tensors: int = 0  # HF tensors that went by the load map instead of the engine's ``load_weights``
    activation_bytes: int = 0  # the most that the engine allocated on top since the sync before; 0 when unknown
    verified_tensors: int = 0  # compared with the engines' own parameters; 0 in a sync that is not verified
    not_comparable: int = 0  # tensors of which that cannot be compared
    hashed_tensors: int = 0  # HF tensors whose hashes were compared and equal
    staging_bytes: int = 0  # staging memory that this rank held while it packed or loaded
    # ``host``, ``pid``, ``rank``, ``device``, and ``epoch``, which added to a span's start gives seconds since 1970; of
    # the run ``ranks`` and ``engine``, and where there is a trainer ``trainer`` and ``model``
    origin: dict[str, Any] = field(default_factory=dict)
    # (stage, start, seconds) in the order in which they ended; starts are seconds of the host's monotonic clock, which
    # all its processes share; stages of ``PHASE_STAGES`` hold others inside
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    spans_left_out: int = 0  # how many there were beyond ``MAX_SPANS``

    def __post_init__(self) -> None:
        self.under_way: list[str] = []  # the stages that this rank is in, the innermost last

    @classmethod
    def begun(cls, global_steps: int | None, manager: str, **run: Any) -> SyncReport:
        """``run`` is the rest of ``origin``."""
        epoch = round(time.time() - time.perf_counter(), 6)
        origin = {"host": socket.gethostname(), "pid": os.getpid(), "device": "CPU", "epoch": epoch, **run}
        return cls(-1 if global_steps is None else int(global_steps), manager, origin=origin)

    def note_release(self, released: int | None) -> None:
        """Counts ``released`` bytes of cached device memory; ``None`` when there was no need."""
        if released is not None:
            self.emptied_caches += 1
            self.released_bytes += released

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to a stage."""
        self.under_way.append(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.under_way.pop()
            self.note_stage(name, started, seconds)

    def note_stage(self, name: str, started: float, seconds: float) -> None:
        """Adds seconds to a stage that ``started`` by ``time.perf_counter`` of any process of this host."""
        self.stages[name] = self.stages.get(name, 0.0) + seconds
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, round(started, 6), round(seconds, 6)))
        else:
            self.spans_left_out += 1

    def put_before(self, earlier: SyncReport) -> None:
        """Takes over the stages and released memory of what came right before."""
        names = {**earlier.stages, **self.stages}
        self.stages = {name: earlier.stages.get(name, 0.0) + self.stages.get(name, 0.0) for name in names}
        self.spans = [*earlier.spans, *self.spans]
        self.emptied_caches += earlier.emptied_caches
        self.released_bytes += earlier.released_bytes

    @property
    def phase_seconds(self) -> float:
        return sum(self.stages.get(name, 0.0) for name in PHASE_STAGES)

    @property
    def in_place(self) -> bool:
        """True if engine ranks read parameters where they lie."""
        return self.delivery == "in place"

    as_dict = asdict

    def line(self) -> str:
        """The sync in one line that fits a terminal; everything else is in the report file and in verl's metrics."""
        cost = f"{self.phase_seconds:.3f} s, {self.tensors} tensors, {size_text(self.nbytes)}"
        proof = f"verified {self.verified_tensors}" if self.verified_tensors else f"hashed {self.hashed_tensors}"
        proof += f", {self.not_comparable} not comparable" if self.not_comparable else ""
        return f"sync of step {self.global_steps}: {cost}, {self.delivery or 'the adapter alone'}, {proof}"


def size_text(nbytes: float) -> str:
    """A size for people, in MB or GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def write_report(report: SyncReport) -> None:
    """Writes one line into the log, and one JSON line into the file that ``VERL_SYNC_REPORT_FILE`` names; a process's
    first line in it also has the versions of the packages here."""
    say(report.line())
    path = os.environ.get(REPORT_FILE_VARIABLE)
    if not path:
        return
    line: dict[str, Any] = {"event": EVENT, **report.as_dict()}
    if f"versions {path}" not in _said:
        line["versions"] = {package: found for package in compat.STACK if (found := compat.version_of(package))}
    try:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        _said.add(f"versions {path}")
    except OSError as error:  # the weights are in place; a lost line must not end the run
        say(f"{REPORT_FILE_VARIABLE}={path}: the report of this sync is not written: {error}")


def timing_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by ``sync/<stage>`` for verl's ``timing_raw``, from the ``SyncReport.as_dict`` of each replica's leader:
    the slowest replica counts."""
    names = sorted({name for report in reports for name in report["stages"]})
    slowest = {f"sync/{name}": max(report["stages"].get(name, 0.0) for report in reports) for name in names}
    return {**slowest, "sync/phase": max(SyncReport(**report).phase_seconds for report in reports)}


def metrics_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``sync/...`` metrics of all replicas, from the same."""
    built = [SyncReport(**report) for report in reports]
    named = {"bytes": "nbytes", "weight_version": "global_steps"}
    return {ACTIVE: 1.0} | {
        f"sync/{name}": float(over(getattr(report, named.get(name, name)) for report in built))
        for over, names in METRICS.items()
        for name in names
    }


def trainer_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a sync that a trainer rank without an engine knows, from its report: ``timing_s/sync/...`` too."""
    timing = {f"timing_s/{name}": value for name, value in timing_of([report]).items()}
    # of these it would report zeros that say nothing
    unknown = ("sync/activation_bytes", "sync/coverage_expected", "sync/coverage_missing", "sync/replayed_tensors")
    return {**timing, **{name: value for name, value in metrics_of([report]).items() if name not in unknown}}


def expect_metrics() -> None:
    """Notes that a trainer of the plugin, which takes the reports, is being built in this process."""
    _said.add("metrics")


def say_without_metrics() -> None:
    """Says, once per process, when no trainer of ours is there to put the reports of syncs into its metrics."""
    if "metrics" not in _said:
        _said.add("metrics")
        say(
            "task runner: NO SYNC METRICS: the plugin does not extend this trainer (verl's legacy trainer, or one that "
            "another plugin registered later), so it logs no timing_s/sync/* and sync/*. Each sync is reported in a "
            f"log line, and in the file that {REPORT_FILE_VARIABLE} names."
        )


def say_who_moves(report: SyncReport) -> None:
    """Says, once per process, that the plugin moves the weights of this run; for the first sync that has succeeded."""
    if "who" not in _said:
        _said.add("who")
        way = f"delivery {report.delivery}, " if report.delivery else "the adapter alone, "
        size = f"{report.tensors} tensors, {size_text(report.nbytes)}"
        say(f"moves the weights of this run: {report.manager}, {way}{size}")


@contextmanager
def progress(report: SyncReport, speaks: bool) -> Iterator[None]:
    """Says every few seconds of a long sync how far it has come; one rank of a run ``speaks``. A thread does so, since
    the sync itself may be waiting for an engine or a device, which is when one wants to know."""
    over, started = threading.Event(), time.monotonic()

    def watch() -> None:
        while not over.wait(EVERY_SECONDS):
            loads = [name for name, *_ in report.spans].count("engine_load")
            loaded = loads * report.buckets if report.in_place else loads
            far = f"{time.monotonic() - started:.0f} s so far, {loaded} of {report.buckets} buckets loaded"
            say(f"sync of step {report.global_steps}: {far}, now in {', '.join(report.under_way[-1:]) or 'no stage'}")

    thread = threading.Thread(target=watch, name="sync progress", daemon=True)
    if speaks:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if speaks:
            thread.join()
