# SPDX-License-Identifier: Apache-2.0
"""What a sync cost: one ``SyncReport`` per sync, into verl's own metrics."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what reads report files later needs no torch
    from verl_sync_plugin.layout.tensors import Plan
    from verl_sync_plugin.transport.protocol import Committed

# In the order of a training step; "phase" is their sum. "before" and "after" make room in device memory, "barrier" is
# the wait for the other ranks to have done so. These three and "offload" are there where our worker runs
# (hooks/worker.py); elsewhere verl does the same around us, and it is in verl's timing_s/update_weights alone.
PHASE_STAGES = (
    "sleep",
    "before",
    "resume_weights",
    "update_weights",
    "offload",
    "after",
    "barrier",
    "resume_kv",
)
# Parts of update_weights, on the reporting rank; "engine_load" is the engine's time and overlaps with the others.
# "open" makes the sharding manager, in the first sync only.
# What is packed while the engine resumes its weights counts in update_weights; resume_weights is the rest of that wait
DETAIL_STAGES = (
    "open",
    "plan",
    "connect",
    "prepare",
    "pack",
    "gather",
    "drain",
    "exchange",
    "settle",
    "wait_engine",
    "engine_load",
    "verify",
    "commit",
)
MAX_SPANS = 1024  # of one sync, some 40 bytes each in the report file


@dataclass
class SyncReport:
    """One sync as one trainer rank saw it.

    Attributes:
        global_steps: verl's weight version, -1 when verl gave none.
        manager: class name of the sharding manager that ran.
        delivery: the way that the bytes of the base weights took; empty when none travelled.
        stages: seconds by stage name (``PHASE_STAGES`` and ``DETAIL_STAGES``).
        nbytes: bytes of all buckets; an engine rank reads ``own_bytes + peer_bytes`` of them, hashing included.
        buckets: number of transfers.
        bucket_bytes: bound on one of them, as configured or chosen; 0 when no base weights travelled.
        tensors: number of HF tensors.
        peak_device_bytes: most device memory that this rank allocated during the sync beyond what it held before.
        device_used_bytes: device memory in use by all processes, by moment (asleep, weights, synced, room, awake).
        emptied_caches: how often the trainer handed cached device memory back: before, after, or both.
        released_bytes: how much that was.
        peak_host_bytes: growth of this rank's peak resident set during the sync.
        coverage_expected: parameters and persistent buffers of the engine's model.
        coverage_missing: how many of them a sync does not write completely.
        replayed_tensors: HF tensors that went by the copy plan instead of the engine's ``load_weights``.
        replayed_bytes: their bytes.
        own_bytes: what the engine rank read on its own device, from the rank beside it.
        peer_bytes: what it read from the memory of other ranks; where trainer and rollout are apart, all of it but
            what was sent to the rollout rank beside.
        gathered_bytes: what this rank received from others by all-gather (gathered delivery).
        network_bytes: what this rank received of segments that ranks of other hosts packed; how often a collective
            passes them on between hosts is not counted.
        direct_bytes: what the engine rank read from parameters where they lie (direct delivery); also in own or peer.
        activation_bytes: the most device memory that the engine took beyond what it keeps since the sync before; 0 when
            unknown.
        hashed_tensors: HF tensors whose hashes were compared and equal; 0 without hashing.
        staging_bytes: staging memory that this rank held while it packed or loaded.
        kept_staging_bytes: what of it stays until the next sync.
        device_total_bytes: memory of the device, 0 for a CPU.
        trainer_reserved_bytes: of ``device_used_bytes``, what this rank's allocator holds, by the same moments.
        origin: where the report comes from: ``host``, ``pid``, ``rank``, ``device``, and ``epoch``, which added to the
            start of a span gives seconds since 1970.
        spans: (stage, start, seconds) in the order in which they ended. Starts are seconds of the host's monotonic
            clock, which all processes of a host share; stages of ``PHASE_STAGES`` hold others inside.
        spans_left_out: how many there were beyond ``MAX_SPANS``.
        verified_tensors: of how many tensors it was compared what lies in the engines' own parameters; 0 in a sync that
            is not verified.
        verified_bytes: what was compared of the parameters of one engine rank.
        not_comparable: tensors of which it cannot be.
        no_room: why an engine rank could not find out where its tensors lie, which then count as not comparable; empty
            where all could.
    """

    global_steps: int = -1
    manager: str = ""
    delivery: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    buckets: int = 0
    bucket_bytes: int = 0
    tensors: int = 0
    peak_device_bytes: int = 0
    device_used_bytes: dict[str, int] = field(default_factory=dict)
    emptied_caches: int = 0
    released_bytes: int = 0
    peak_host_bytes: int = 0
    coverage_expected: int = 0
    coverage_missing: int = 0
    replayed_tensors: int = 0
    replayed_bytes: int = 0
    own_bytes: int = 0
    peer_bytes: int = 0
    gathered_bytes: int = 0
    network_bytes: int = 0
    direct_bytes: int = 0
    activation_bytes: int = 0
    verified_tensors: int = 0
    verified_bytes: int = 0
    not_comparable: int = 0
    no_room: str = ""
    hashed_tensors: int = 0
    staging_bytes: int = 0
    kept_staging_bytes: int = 0
    device_total_bytes: int = 0
    trainer_reserved_bytes: dict[str, int] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    spans_left_out: int = 0

    def __post_init__(self) -> None:
        self.under_way: list[str] = []  # the stages that this rank is in, the innermost last
        self.handed_over: tuple[Plan, int] | None = None  # the plan under way, and the last bucket handed over

    @classmethod
    def begun(cls, global_steps: int | None, manager: str, rank: int) -> SyncReport:
        """The report of a sync that begins now."""
        epoch = round(time.time() - time.perf_counter(), 6)
        origin = {"host": socket.gethostname(), "pid": os.getpid(), "rank": rank, "device": "CPU", "epoch": epoch}
        return cls(-1 if global_steps is None else int(global_steps), manager, origin=origin)

    def note(self, committed: Committed, plan: Plan, direct: bool = False) -> None:
        """Takes over what the engine rank did."""
        self.coverage_expected, self.coverage_missing = committed.coverage.expected, len(committed.coverage.missing)
        self.replayed_tensors, self.replayed_bytes = committed.replayed_tensors, committed.replayed_bytes
        self.activation_bytes = committed.activation_bytes
        self.own_bytes, self.peer_bytes = committed.own_bytes, committed.peer_bytes
        if direct:
            self.direct_bytes = committed.own_bytes + committed.peer_bytes
        elif not plan.sharded:
            self.gathered_bytes = sum(bucket.nbytes - bucket.stride for bucket in plan.buckets)

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
        """Adds seconds to a stage.

        Args:
            name: of the stage.
            started: by ``time.perf_counter`` of any process of this host.
            seconds: that it lasted.
        """
        self.stages[name] = self.stages.get(name, 0.0) + seconds
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, round(started, 6), round(seconds, 6)))
        else:
            self.spans_left_out += 1

    def put_before(self, earlier: SyncReport) -> None:
        """Takes over the stages of what came right before."""
        names = {**earlier.stages, **self.stages}
        self.stages = {name: earlier.stages.get(name, 0.0) + self.stages.get(name, 0.0) for name in names}
        self.spans = [*earlier.spans, *self.spans]

    @property
    def phase_seconds(self) -> float:
        return sum(self.stages.get(name, 0.0) for name in PHASE_STAGES)

    @property
    def gigabytes_per_second(self) -> float:
        seconds = self.stages.get("update_weights", 0.0)
        return self.nbytes / seconds / 1e9 if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The report in one log line; of a verified sync also how many tensors it compared in the engine."""
        compared = f" verified={self.verified_tensors} not_comparable={self.not_comparable}"
        proven = compared if self.verified_tensors or self.not_comparable else ""
        room = " (an engine rank had no memory to find out what it holds)" if self.no_room else ""
        stages = " ".join(f"{name}={seconds:.4f}s" for name, seconds in self.stages.items())
        return (
            f"sync of step {self.global_steps}: phase={self.phase_seconds:.4f}s {stages} "
            f"{self.nbytes / 1e9:.3f}GB {self.gigabytes_per_second:.2f}GB/s buckets={self.buckets} "
            f"of={self.bucket_bytes / 2**20:g}MiB tensors={self.tensors} emptied_caches={self.emptied_caches} "
            f"released={self.released_bytes / 2**20:.0f}MiB "
            f"peak_device={self.peak_device_bytes / 2**20:.0f}MiB peak_host={self.peak_host_bytes / 2**20:.0f}MiB"
            f"{proven}{room}"
        )


def peak_resident_bytes() -> int:
    """This process's peak resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
