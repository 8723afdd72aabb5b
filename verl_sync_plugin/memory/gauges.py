# SPDX-License-Identifier: Apache-2.0
"""Memory readings of one trainer rank for its ``SyncReport``."""

from __future__ import annotations

import torch

from verl_sync_plugin.report.sync_report import SyncReport, peak_resident_bytes


def note_device_memory(report: SyncReport, device: torch.device, moment: str) -> None:
    """Device memory that all processes use now, and what of it this process's allocator holds, in bytes, into
    ``report.device_used_bytes`` and ``report.trainer_reserved_bytes``; earlier readings of a moment stay."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        report.device_total_bytes = total
        report.device_used_bytes.setdefault(moment, total - free)
        report.trainer_reserved_bytes.setdefault(moment, _bytes("reserved", "current"))


class PeakMemory:
    """Device and host memory that a sync needs beyond what was held before it.

    The device may fail at any call, so each is made where ranks agree on failures.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = peak_resident_bytes()
        self._before = 0

    def begin(self) -> None:
        """Notes what is held now, so that only what the sync adds is counted."""
        self._host = peak_resident_bytes()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = _bytes("allocated", "current")

    def into(self, report: SyncReport) -> None:
        """Writes both peaks, in bytes, and the device's name into a report; a higher value that is there stays."""
        report.peak_host_bytes = max(report.peak_host_bytes, peak_resident_bytes() - self._host)
        if self._cuda:
            peak = _bytes("allocated", "peak") - self._before
            report.peak_device_bytes = max(report.peak_device_bytes, peak)
            report.origin["device"] = torch.cuda.get_device_name()


def _bytes(kind: str, which: str) -> int:
    """A counter of torch's allocator; ``memory_allocated`` sorts all of them for one."""
    return int(torch.cuda.memory_stats_as_nested_dict().get(f"{kind}_bytes", {}).get("all", {}).get(which, 0))
