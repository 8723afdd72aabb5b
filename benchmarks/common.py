# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmarks: command lines, processes, the machine, the form of a result."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

# What says nothing about the measurement: where files lie, how long it may take, and who else uses the machine
LOCAL = frozenset({"work", "out", "timeout", "budget"})
REPEATED = ("override", "plugin_override")  # one option for each value, since Hydra's overrides may hold commas


def command_line(harness: str, args: argparse.Namespace) -> str:
    """The command that measures the same again, without the paths of this machine.

    Args:
        harness: its name under ``benchmarks``.
        args: as parsed; a list stands for an option with commas.
    """
    words = ["python", "-m", f"benchmarks.{harness}"]
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in REPEATED:
            words += [f"{option}={each}" for each in value]
        elif isinstance(value, bool):
            words += [option] if value and name not in LOCAL else []
        elif name not in LOCAL:
            words += [option, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


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


def run_command(
    command: Sequence[str], env: Mapping[str, str], log: Path, timeout: float, cwd: Path
) -> tuple[int, float]:
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


PACKAGES = ("verl", "sglang", "torch", "transformers", "ray", "triton", "torch-memory-saver", "verl-sync-plugin")


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


def describe_machine() -> dict[str, Any]:
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


def result_of(case: str, line: str, runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A whole result: what was measured, with which command, where."""
    return {
        "case": case,
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": line,
        "runs": runs,
        **more,
    }


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Writes a result that has the form; after every run, so that a visit that is cut short keeps what it measured."""
    assert not problems_of(result), problems_of(result)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parser_of(harness: str, text: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{harness}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=harness != "soak")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for models and logs; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def work_of(args: argparse.Namespace) -> Path:
    """The folder of ``--work``, which exists then."""
    work: Path = (args.work or Path(tempfile.mkdtemp(prefix="sync-bench-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    return work


def wait_until_idle(limit_mib: int = 2048, timeout: float = 30.0) -> bool:
    """Waits until no GPU has more than ``limit_mib`` in use: memory of killed processes returns with a delay."""
    end = time.monotonic() + timeout
    while any(int(row[0]) > limit_mib for row in _gpu_rows("memory.used")):
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


# tuned: stock verl with TMS_RETAIN_CPU_BACKUP=1, by which torch_memory_saver keeps the memory of its host copy
VARIANTS = ("stock", "tuned", "plugin")
STAGES = ("sleep", "resume_weights", "update_weights", "resume_kv", "phase")
TOP: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "machine": dict,
    "versions": dict,
    "commit": str,
    "date": str,
    "command": str,
    "runs": list,
}
RUN: dict[str, type | tuple[type, ...]] = {
    "variant": str,
    "settings": dict,
    "stages": dict,
    "samples": dict,
    "bytes": (int, type(None)),
    "peak_device_bytes": (int, type(None)),
    "peak_host_bytes": int,
}
NUMBER = (int, float)


def _key_problems(value: Any, form: dict[str, type | tuple[type, ...]], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: not an object"]
    found = [f"{where}: missing {key!r}" for key in form.keys() - value.keys()]
    found += [f"{where}: unknown {key!r}" for key in value.keys() - form.keys()]
    for key in form.keys() & value.keys():
        if not isinstance(value[key], form[key]) or isinstance(value[key], bool):
            found.append(f"{where}.{key}: {value[key]!r} has the wrong type")
    return sorted(found)


def _stage_problems(stages: dict[str, Any], where: str) -> list[str]:
    found = [] if set(stages) == set(STAGES) else [f"{where}: stages are {sorted(stages)}, not {sorted(STAGES)}"]
    for name, seconds in stages.items():
        if isinstance(seconds, bool) or not isinstance(seconds, NUMBER) or seconds < 0:
            found.append(f"{where}.{name}: {seconds!r} is not a number of seconds")
    return found


def _run_problems(run: Any, where: str) -> list[str]:
    found = _key_problems(run, RUN, where)
    if found:
        return found
    if run["variant"] not in VARIANTS:
        found.append(f"{where}.variant: {run['variant']!r} is not one of {VARIANTS}")
    found += _stage_problems(run["stages"], f"{where}.stages")
    if not found and run["stages"]["phase"] <= 0:
        found.append(f"{where}.stages.phase: not above zero")
    if not isinstance(run["samples"].get("syncs"), list) or not run["samples"]["syncs"]:
        found.append(f"{where}.samples.syncs: missing or empty")
    return found


def problems_of(result: Any) -> list[str]:
    """Lists the errors in a result; empty when it has the form."""
    searched = isinstance(result, dict) and isinstance(result.get("attempts"), list)
    found = _key_problems(result, {**TOP, "attempts": list} if searched else TOP, "result")
    if found:
        return found
    if "gpu" not in result["machine"]:
        found.append("machine: missing 'gpu'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
        found.append(f"date: {result['date']!r} is not YYYY-MM-DD")
    # of a search every try is an attempt, and a run only what survived
    if not (result["attempts"] if searched else result["runs"]):
        found.append("runs: empty")
    for index, run in enumerate(result["runs"]):
        found += _run_problems(run, f"runs[{index}]")
    return found


DEVICE_BYTES_PER_SECOND = 4.3e12  # an H200's memory, read and written, as copies reach it


def floor_seconds(nbytes: int) -> float:
    """The floor of a transfer on one device, which reads a whole model's bytes and writes them."""
    return 2 * nbytes / DEVICE_BYTES_PER_SECOND


def link_bytes_per_second() -> int | None:
    """The rate, measured in a process of its own, whose device memory goes back; None where it could not be had."""
    code = "from benchmarks.common import print_link_rate; print_link_rate()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        print(f"the link was not measured: {done.stderr.strip()[-300:]}", file=sys.stderr, flush=True)
        return None
    return int(done.stdout.split()[-1])


def print_link_rate() -> None:
    """Prints bytes per second from the first device to the second, of the best of ten copies by the driver."""
    import torch

    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
    target, seconds = torch.empty_like(source, device="cuda:1"), []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - begin)
    print(int(source.numel() / min(seconds)))
