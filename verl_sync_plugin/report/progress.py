# SPDX-License-Identifier: Apache-2.0
"""Lines on the terminal while a sync takes long, as a first one may: which bucket, how many bytes, in which stage."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from verl_sync_plugin.log import say
from verl_sync_plugin.report.sync_report import SyncReport

SILENT_SECONDS = 5.0  # a sync that takes no longer says nothing on its way
EVERY_SECONDS = 5.0


class Progress:
    """Around one sync: says every few seconds how far it has come. One rank of a run speaks.

    A thread does so, since the sync itself may be waiting for an engine or a device, which is when one wants to know.

    Args:
        report: of the sync.
        speaks: whether this rank does.
    """

    def __init__(self, report: SyncReport, speaks: bool) -> None:
        self._report = report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sync progress", daemon=True) if speaks else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        started, wait = time.monotonic(), SILENT_SECONDS
        while not self._over.wait(wait):
            wait = EVERY_SECONDS
            say(progress_line(self._report, time.monotonic() - started))


def progress_line(report: SyncReport, seconds: float) -> str:
    """What is known of a sync under way, in one line."""
    parts = [f"sync of step {report.global_steps}: {seconds:.0f} s so far"]
    if report.handed_over is None:
        parts.append("no bucket handed over yet")
    else:
        plan, index = report.handed_over
        done = len(plan.buckets) if index < 0 else index + 1  # all at once, where parameters are read in place
        sent = min(sum(bucket.nbytes for bucket in plan.buckets[:done]), plan.nbytes)
        parts.append(f"bucket {done} of {len(plan.buckets)}, {sent / 1e9:.2f} of {plan.nbytes / 1e9:.2f} GB")
    if stages := list(report.under_way):
        parts.append(f"now in {stages[-1]}")
    return ", ".join(parts)
