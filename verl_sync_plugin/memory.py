# SPDX-License-Identifier: Apache-2.0
"""Decides how much cached device memory the trainer hands back before the engine takes its own.

The allocator of the trainer keeps what it has freed. The engine is another process and cannot use that: when it resumes
more than the device has free, its memory saver ends it. So stock verl empties the cache at both ends of every sync, and
the next training step allocates all of it again. Here the cache stays while the device has enough free without it:
what the engine is about to resume, and a reserve on top. When that is missing, all of the cache goes; handing back a
part of it made no training step faster (``docs/design/memory.md``).

Why that is safe:

- What the engine resumes has the same size in every step. It is measured where it happens, on this rank's device, in
  the first syncs, during which the cache is always emptied; what else was allocated meanwhile only makes it larger.
  What was freed meanwhile makes it smaller (an engine empties its cache when it flushes), so the most of several syncs
  and of all ranks counts: all engines of a run are alike.
- The reserve is for what the engine allocates outside of its saver, above all the activations while it generates:
  1/``RESERVE_SHARE`` of the device, and never less than the engine's own estimate (``Estimate``). That is meant for any
  model and load. An engine that says how much it really took (``engine/session.py``) gets twice the most of all
  syncs and a gigabyte, and never less than 1/``LEAST_SHARE`` of the device. What it takes is bounded by its prefill
  chunk, which the first rollouts usually fill; should one take more, the reserve grows with it.
- The trainer's own allocations need none of this: its allocator frees its cache by itself before it gives up.
- Nobody else's memory is counted on: next to another engine on the same device the cache always goes.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from verl_sync_plugin.report import SyncReport

LEARNING_SYNCS = 2
RESERVE_SHARE = 8
LEAST_SHARE = 32
MEASURED_TIMES, MEASURED_BESIDE = 2, 1 << 30

# (before, after) of each resume, as moments of ``SyncReport.device_used_bytes``
FIRST = ("asleep", "weights")
REST = ("room", "awake")

Growth = dict[tuple[str, str], int]
# What an engine says that generating takes on top of what it resumes, in bytes, on a device of so many bytes
Estimate = Callable[[int], int]


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
    return {(begin, end): used[end] - used[begin] for begin, end in (FIRST, REST) if begin in used and end in used}


class Room:
    """One rank's knowledge of what its engine needs, and the decision whether to hand cached memory back.

    Args:
        read: the device's memory.
        estimate: the engine's own, of what generating takes.
        always: decide like stock verl.
    """

    def __init__(self, read: Callable[[], DeviceMemory | None], estimate: Estimate, always: bool = False) -> None:
        self._read = read
        self._estimate = estimate
        self._always = always
        self._most: Growth = {}
        self._syncs = 0
        self._activations = 0

    def note_activations(self, nbytes: int) -> None:
        """Takes in what this rank's engine rank allocated between two syncs; 0 when it does not know."""
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

    def make(self, resume: tuple[str, str], release: Callable[[], int], more: int = 0) -> int | None:
        """Hands back the cache if the engine needs it for a resume.

        Args:
            resume: ``FIRST`` or ``REST``.
            release: hands back everything and says how many bytes went.
            more: bytes that the trainer allocates before that.

        Returns:
            Bytes that went; ``None`` when none had to.
        """
        memory, grown = self._read(), self._most.get(resume, 0)
        if self._always or self.learning or memory is None or grown < 0:  # below 0 somebody else freed more
            return release()
        short = grown + more + self._reserve(memory.total) > memory.free
        return release() if short and memory.cached > 0 else None

    def _reserve(self, total: int) -> int:
        """The bytes that stay free for what the engine allocates while it generates, on a device of ``total`` bytes."""
        most = max(total // RESERVE_SHARE, self._estimate(total))
        if not self._activations:
            return most
        return min(most, max(total // LEAST_SHARE, MEASURED_TIMES * self._activations + MEASURED_BESIDE))


def note_device_memory(report: SyncReport, device: torch.device, moment: str) -> None:
    """Notes the device memory that all processes use now; earlier readings of a moment stay."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        report.device_used_bytes.setdefault(moment, total - free)


@contextmanager
def measured(
    report: SyncReport, device: torch.device, attempt: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Around a part of a sync: notes the device and host memory that it needs beyond what was held before it, in bytes,
    and the device's name; a higher value that is there stays. The device may fail at any call, which ``attempt`` keeps
    until ranks settle."""
    cuda, host, before = device.type == "cuda", _peak_resident_bytes(), 0
    with attempt():
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = _allocated("current")
    yield
    with attempt():
        report.peak_host_bytes = max(report.peak_host_bytes, _peak_resident_bytes() - host)
        if cuda:
            report.peak_device_bytes = max(report.peak_device_bytes, _allocated("peak") - before)
            report.origin["device"] = torch.cuda.get_device_name()


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allocated(which: str) -> int:
    """Reads a counter of torch's allocator; ``memory_allocated`` sorts all of them for one."""
    return int(torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {}).get(which, 0))


@contextmanager
def no_collection() -> Iterator[None]:
    """Puts Python's cyclic garbage collector off; what is counted down to zero goes as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
