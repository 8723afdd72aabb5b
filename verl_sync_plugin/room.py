# SPDX-License-Identifier: Apache-2.0
"""Decides whether the trainer hands its cached device memory back before the engine takes its own.

An engine that resumes more than the device has free is ended by its memory saver; see ``docs/design/memory.md``.

The cache stays while the device has enough free without it: what the engine is about to resume, and a reserve. Else all
of it goes; handing back a part made no training step faster. Why that is safe:

- What the engine resumes has the same size in every step. It is measured on this rank's device in the first syncs,
  during which the cache always goes; what else was allocated meanwhile only makes it larger. What was freed meanwhile
  makes it smaller, so the most of several syncs and of all ranks counts: all engines of a run are alike.
- The reserve is for what the engine allocates outside of its saver, above all activations. Its prefill chunk bounds
  that, and the first rollouts usually fill one; the reserve grows with what it says that it took.
- The trainer's own allocator frees its cache by itself before it gives up.
- Nobody else's memory is counted on: next to another engine on the same device the cache always goes.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from verl_sync_plugin.report import REPORT_FILE_VARIABLE, SyncReport

LEARNING_SYNCS = 2
RESERVE_SHARE = 5
LEAST_SHARE = 32
MEASURED_TIMES, MEASURED_BESIDE = 2, 1 << 30

# (before, after) of each resume, as moments of ``SyncReport.device_used_bytes``
RESUMES = WEIGHTS_RESUME, KV_RESUME = ("asleep", "weights"), ("room", "awake")

Growth = dict[tuple[str, str], int]


@dataclass(frozen=True)
class DeviceMemory:
    """One reading, in bytes."""

    free: int  # what no process holds
    total: int  # of the device
    cached: int  # what this process's allocator holds without using it


def read_device(device: torch.device) -> DeviceMemory | None:
    """Reads what a device has now; ``None`` for a device without memory of its own."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(free, total, torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def release_cache(device: torch.device) -> int:
    """Hands back all that torch has cached of a device and says how many bytes that was; a CPU has no cache."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def growth(used: Mapping[str, int]) -> Growth:
    """Returns by how much the use of a device grew over each resume of one sync."""
    return {(begin, end): used[end] - used[begin] for begin, end in RESUMES if {begin, end} <= used.keys()}


class Room:
    """One rank's knowledge of what its engine needs, and the decision whether to hand cached memory back. ``read``
    reads the device; ``always``: decide like stock verl."""

    def __init__(self, read: Callable[[], DeviceMemory | None], always: bool = False) -> None:
        self._read, self._always = read, always
        self._most: Growth = {}
        self._syncs = self._activations = 0

    def note_activations(self, nbytes: int) -> None:
        """Takes in the bytes that this rank's engine rank allocated between two syncs; 0 when it does not know."""
        self._activations = max(self._activations, nbytes)

    @property
    def learning(self) -> bool:
        """True if the growth of the sync under way is wanted."""
        return self._syncs < LEARNING_SYNCS

    def learn(self, everywhere: Iterable[Growth]) -> None:
        """Takes in the growth of one sync on all ranks."""
        self._syncs += 1
        for measured in everywhere:
            for resume, grown in measured.items():
                self._most[resume] = max(grown, self._most.get(resume, grown))

    def make_room(self, resume: tuple[str, str], release: Callable[[], int], more: int = 0) -> int | None:
        """Hands back the cache if the engine needs it for a resume, one of ``RESUMES``. Returns the bytes that went;
        ``None`` when none had to. ``release`` hands back everything and returns the bytes; ``more``: bytes that the
        trainer allocates before the resume."""
        memory, grown = self._read(), self._most.get(resume, 0)
        if self._always or self.learning or memory is None or grown < 0:  # below 0 somebody else freed more
            return release()
        reserve = memory.total // RESERVE_SHARE
        if self._activations:
            reserve = max(memory.total // LEAST_SHARE, MEASURED_TIMES * self._activations + MEASURED_BESIDE)
        return release() if grown + more + reserve > memory.free and memory.cached > 0 else None


def note_device_memory(report: SyncReport, device: torch.device, moment: str) -> None:
    """Notes the device memory that all processes use now; earlier readings of a moment stay."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        report.device_used_bytes.setdefault(moment, total - free)


@contextmanager
def measured(
    report: SyncReport, device: torch.device, attempt: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Around a part of a sync: notes the device and host memory that it needs beyond what was held, in bytes, and the
    device's name; a higher value stays. The device may fail at any call, which ``attempt`` keeps."""

    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the peak

    def allocated(which: str) -> int:  # ``memory_allocated`` sorts all of torch's counters for one
        return int(torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {}).get(which, 0))

    cuda, host, before = device.type == "cuda", resident(), 0
    counts = cuda and REPORT_FILE_VARIABLE in os.environ  # this resets verl's perf/max_memory_allocated_gb
    with attempt():
        if counts:
            torch.cuda.reset_peak_memory_stats()
            before = allocated("current")
    yield
    with attempt():
        report.peak_host_bytes = max(report.peak_host_bytes, resident() - host)
        if counts:
            report.peak_device_bytes = max(report.peak_device_bytes, allocated("peak") - before)
        if cuda:
            report.origin["device"] = torch.cuda.get_device_name()


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches Python's cyclic garbage collector off; reference counting still frees objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
