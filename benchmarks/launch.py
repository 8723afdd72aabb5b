# SPDX-License-Identifier: Apache-2.0
"""Starts one training run with a hard time limit and leaves none of its processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
TIMED_OUT = 124


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process.

    Ray and SGLang put their processes into sessions of their own, which a signal to the process group misses; below
    a subreaper they stay in this process's tree, so that exactly what was started here can be found and ended.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_descendants(grace: float = 10.0) -> int:
    """Ends every process below this one, politely, then not; returns how many there were."""
    ended: set[int] = set()
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        # a second look finds what was started or orphaned during the first
        for _ in range(2):
            left = psutil.Process().children(recursive=True)
            for process in left:
                ended.add(process.pid)
                try:
                    ask(process)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=grace)
    return len(ended)


def run(command: Sequence[str], env: Mapping[str, str], log: Path, timeout: float, cwd: Path) -> tuple[int, float]:
    """Runs ``command`` with its output in ``log``.

    Returns:
        The exit status, ``TIMED_OUT`` when the limit was reached, and the seconds it took.
    """
    become_subreaper()
    start = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=dict(env), stdout=output, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            status = TIMED_OUT
        finally:
            end_descendants()
    return status, time.monotonic() - start
