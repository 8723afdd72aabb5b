# SPDX-License-Identifier: Apache-2.0
"""What of the machine a sync depends on: GPUs and how they reach each other, variables, shared memory, limits."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor import gpus
from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CUMEM = "NCCL_CUMEM_ENABLE"
SHM = Path("/dev/shm")
LEAST_SHM_GIB = 1.0  # Docker gives 64 MiB; NCCL and Ray's object store need more than that
LEAST_FILES = 4096  # Ray warns below 65536, and SGLang, Ray and the connections of a sync together need thousands
LEAST_PROCESSES = 4096
INFINIBAND = Path("/sys/class/infiniband")


def on_cpu() -> bool:
    """Whether the stack is told to run without a GPU."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def facts() -> dict[str, Any]:
    """What was read of this machine; every value is plain, and ``None`` where it is unknown."""
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return {
        "host": os.uname().nodename,
        "platform": sys.platform,
        "cpus": os.cpu_count(),
        "gpu": gpus.facts(),
        "variables": {name: os.environ.get(name) for name in (*ALLOCATOR_VARIABLES, CUMEM, "CUDA_VISIBLE_DEVICES")},
        "shm_bytes": {"size": shm.total, "free": shm.free} if shm else None,
        "limits": {name: _soft_limit(name) for name in ("nofile", "memlock", "nproc")},
        "infiniband": INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    }


def _soft_limit(name: str) -> int | None:
    """The soft limit, ``None`` where there is none."""
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return None if soft == resource.RLIM_INFINITY else soft


def check(read: Mapping[str, Any]) -> list[Finding]:
    """Judges what ``facts`` has read."""
    return [
        *gpus.check(read["gpu"], on_cpu()),
        *_check_variables(read["variables"]),
        *_check_shm(read["shm_bytes"]),
        *_check_limits(read["limits"], read["infiniband"]),
    ]


def _check_variables(variables: Mapping[str, str | None]) -> Iterator[Finding]:
    set_on = [name for name in ALLOCATOR_VARIABLES if _expandable(variables[name] or "")]
    for name in set_on:
        text = f"{name}={variables[name]}: the engine's memory saver does not work with expandable segments, and a "
        text += "sync cannot read parameters where they lie"
        yield problem("expandable-segments", text, f"take expandable_segments:True out of {name}, on every node")
    if not set_on:
        yield ok("expandable-segments", "not asked for by " + " or ".join(ALLOCATOR_VARIABLES))
    value = variables[CUMEM]
    if value in (None, "0"):
        yield ok("nccl-cumem", f"{CUMEM}={value}" if value else f"{CUMEM} is not set; verl sets it to 0")
    else:
        text = f"{CUMEM}={value}: verl sets it to 0 for the engine, and both ends of an NCCL group have to agree"
        yield warning("nccl-cumem", text, f"unset {CUMEM}, or set it to 0 on every node")


def _expandable(setting: str) -> bool:
    words = (part.partition(":") for part in setting.replace(" ", "").lower().split(","))
    return any(key == "expandable_segments" and value in ("true", "1") for key, _, value in words)


def _check_shm(shm: Mapping[str, int] | None) -> Iterator[Finding]:
    if shm is None:
        yield warning("shm", f"there is no {SHM}", "mount a tmpfs there; NCCL and Ray need it")
        return
    size, free = shm["size"] / 2**30, shm["free"] / 2**30
    text = f"{SHM} has {size:.1f} GiB, {free:.1f} GiB of them free"
    if size < LEAST_SHM_GIB:
        yield problem("shm", text, "start the container with --shm-size=16g (Kubernetes: an emptyDir of medium Memory)")
    elif free < LEAST_SHM_GIB:
        yield warning("shm", text, f"remove what earlier runs left there: ls -la {SHM}")
    else:
        yield ok("shm", text)


def _check_limits(limits: Mapping[str, int | None], infiniband: bool) -> Iterator[Finding]:
    for name, least, option in (("nofile", LEAST_FILES, "-n 65536"), ("nproc", LEAST_PROCESSES, "-u unlimited")):
        value = limits[name]
        if value is not None and value < least:
            text = f"ulimit: {name} is {value}, and the processes of a run need up to thousands"
            yield warning(f"ulimit/{name}", text, f"ulimit {option}, before ray start or the run")
        else:
            yield ok(f"ulimit/{name}", "unlimited" if value is None else str(value))
    locked = limits["memlock"]
    said = "unlimited" if locked is None else f"{locked / 2**10:.0f} KiB"
    if infiniband and locked is not None:
        text = f"ulimit: memlock is {said}, and InfiniBand needs to lock what it sends"
        yield warning("ulimit/memlock", text, "ulimit -l unlimited (Docker: --ulimit memlock=-1)")
    else:
        yield ok("ulimit/memlock", said)
