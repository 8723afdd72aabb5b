# SPDX-License-Identifier: Apache-2.0
"""What a result says about where it was measured: machine, versions, commit. Imports neither torch nor verl."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import schema

PACKAGES = (
    "verl", "sglang", "torch", "transformers", "ray", "triton", "torch-memory-saver", "verl-sync-plugin", *schema.PEERS,
)  # fmt: skip


def _output(command: list[str], cwd: Path | None = None) -> str | None:
    """The output of a short command; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu_rows(query: str) -> list[list[str]]:
    # nvidia-smi itself shows all GPUs, also those that another lane of the visit uses
    only = [f"--id={visible}"] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    text = _output(["nvidia-smi", *only, f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    return [[field.strip() for field in line.split(",")] for line in (text or "").splitlines() if line.strip()]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe() -> dict[str, Any]:
    """The machine: its accelerators by name, driver, processor and memory."""
    gpus = _gpu_rows("name,memory.total,driver_version")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpu": gpus[0][0] if gpus else None,
        "gpus": len(gpus),
        "gpu_memory_mib": int(gpus[0][1]) if gpus else None,
        "driver": gpus[0][2] if gpus else None,
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
    }


def versions() -> dict[str, str]:
    """The installed versions of the packages that matter; a missing one is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """``$COMMIT``, else the checkout's commit, else ``unknown``."""
    here = Path(__file__).resolve().parent
    return os.environ.get("COMMIT") or _output(["git", "rev-parse", "HEAD"], here) or "unknown"


def result(case: str, line: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole result, in the form of ``schema``: what was measured, with which command, where."""
    return {
        "case": case,
        "machine": describe(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": line,
        "runs": runs,
    }


def wait_until_idle(limit_mib: int = 2048, timeout: float = 30.0) -> bool:
    """Waits until no GPU has more than ``limit_mib`` in use: memory of killed processes returns with a delay."""
    end = time.monotonic() + timeout
    while any(int(row[0]) > limit_mib for row in _gpu_rows("memory.used")):
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True
