# SPDX-License-Identifier: Apache-2.0
"""Readings of the machine for the probe: device memory, host memory and their peaks while a call runs."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import psutil

DEFAULT_SAMPLE_MS = 10.0


def _cuda() -> Any | None:
    """torch.cuda where this process already uses it.

    Asking any other process would create a CUDA context there: memory and time that no run without a probe has.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # cheap, where asking for GPUs is not
        return None
    return torch.cuda


def synchronize() -> None:
    """Waits for the device, so that a stage's work is counted in that stage."""
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def current_device() -> int | None:
    """The index of the device this thread works on; None without one."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.current_device())


def gpus() -> int:
    """How many GPUs this process sees; 0 where it uses none."""
    cuda = _cuda()
    return 0 if cuda is None else int(cuda.device_count())


def device_used_bytes(device: int | None) -> int | None:
    """Bytes in use on the whole device, by every process on it; None where no device is in use."""
    cuda = _cuda()
    if cuda is None or device is None:
        return None
    free, total = cuda.mem_get_info(device)
    return int(total - free)


def torch_bytes() -> dict[str, int | None]:
    """Bytes that this process's allocator has handed out, and bytes that it holds."""
    cuda = _cuda()
    if cuda is None:
        return {"torch_allocated_bytes": None, "torch_reserved_bytes": None}
    return {"torch_allocated_bytes": cuda.memory_allocated(), "torch_reserved_bytes": cuda.memory_reserved()}


def reset_rss_peak() -> None:
    """Resets the peak of this process's resident set; where Linux refuses, the peak stays that of its whole life."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def rss_peak_bytes() -> int:
    """The resident-set peak of this process since the last reset."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def host_used_bytes() -> int:
    """Memory of the host that is not available: pinned memory is in no process's resident set."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def mapped_shared_bytes(pid: int) -> int:
    """Bytes of shared memory that a process has mapped: named (in ``/dev/shm``) and anonymous."""
    total = 0
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "/dev/shm/" in line or "/memfd:" in line:
                first, _, last = line.split(" ", 1)[0].partition("-")
                total += int(last, 16) - int(first, 16)
    return total


class PeakSampler:
    """Samples memory between ``start`` and ``stop``: of the whole device, since the sync lives in two processes."""

    def __init__(self, threaded: bool) -> None:
        interval = float(os.environ.get("SYNC_PROBE_SAMPLE_MS", DEFAULT_SAMPLE_MS)) / 1000.0
        self._interval = interval if threaded else 0.0
        self._device = current_device()  # read here: a new thread would report device 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.device_peak: int | None = None

    def _sample(self) -> None:
        used = device_used_bytes(self._device)
        if used is not None:
            self.device_peak = max(used, self.device_peak or 0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def start(self) -> None:
        """Takes a first sample and goes on in a thread; without a thread the two end points are all."""
        self._sample()
        if self._interval > 0:
            self._thread = threading.Thread(target=self._run, name="sync-probe-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread and takes a last sample."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()
