# SPDX-License-Identifier: Apache-2.0
"""Searches the highest ``gpu_memory_utilization`` with which a training survives, stock and plugin, on a full device.

``python -m benchmarks.memory --case memory-7b-2gpu --model-size 7b --gpus 2 --rollout-tp 2 --ballast-gb 61 --out FILE``

Every try is a training of the phase's harness (``phase.py``) next to a process that holds the ballast. Of each way the
shares are tried from the highest until one survives. The result is written after each try.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import common, models, phase
from benchmarks.common import command_line

# what a try runs: the variant of the phase's harness, and the overrides that the plugin alone knows
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stock": ("stock", ()),
    "plugin-at-once": ("plugin", ("actor_rollout_ref.rollout.multi_stage_wake_up=False",)),
    "plugin-multi-stage": ("plugin", ("actor_rollout_ref.rollout.multi_stage_wake_up=True",)),
}
_TOKENS = re.compile(r"max_total_num_tokens=(\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|Not enough memory|cuMem\w+ failed|CUDA_ERROR", re.IGNORECASE)
# an exception by name, and a warning: NCCL's "WARN", Python's and loggers'
_RAISED = re.compile(r"\b(?:\w+Error|\w+Exception)\b")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning\b")
LONGEST = 400  # characters of an error that are kept


def kv_tokens(log: str) -> int | None:
    """How many tokens SGLang's KV cache holds, the fewest of all servers; None where no server came so far."""
    return min((int(value) for value in _TOKENS.findall(log)), default=None)


def ran_out(log: str) -> bool:
    """True if a log speaks of memory that could not be had."""
    return _OUT_OF_MEMORY.search(log) is not None


def is_warning(line: str) -> bool:
    """True if a line only warns: the exception stands elsewhere."""
    return _WARNING.search(line) is not None and _RAISED.search(line) is None


def reason(log: str) -> str:
    """The line of a log about memory that could not be had that says most, the first of its kind: an exception, else
    any that is no warning, else a warning. Without one: the log's last line that is not empty."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    about = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    raised = [line for line in about if _RAISED.search(line)]
    plain = [line for line in about if not is_warning(line)]
    return (raised or plain or about or lines[-1:] or ["nothing was logged"])[0][:LONGEST]


def pending(attempts: list[dict[str, Any]], ways: list[str], shares: list[float]) -> Iterator[tuple[str, float]]:
    """Chooses the next attempt, given all so far: for each way the shares from the highest, until one survives.

    ``attempts`` may grow between two steps. The ways take turns, so that a search that is cut short has some of each.
    """
    while True:
        turn = [
            (way, share)
            for way in ways
            if not any(attempt["way"] == way and attempt["survived"] for attempt in attempts)
            for share in shares
            if not any((attempt["way"], attempt["share"]) == (way, share) for attempt in attempts)
        ]
        if not turn:
            return
        yield max(turn, key=lambda one: (one[1], -ways.index(one[0])))


READY = "ballast is held"


@contextmanager
def ballast(gb: float, gpus: int) -> Iterator[None]:
    """Holds ``gb`` times 1e9 bytes of each of the first ``gpus`` devices.

    Raises:
        RuntimeError: the memory could not be had.
    """
    if not gb:
        yield
        return
    command = [sys.executable, "-c", f"from benchmarks.memory import take_ballast; take_ballast({gb}, {gpus})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline().strip() != READY:
                raise RuntimeError(f"{gb} GB of {gpus} devices could not be taken")
            yield
        finally:
            process.stdin.close()
            process.wait(30)


def take_ballast(gb: float, gpus: int) -> None:
    """Takes the memory in this process, and keeps it until its standard input ends."""
    import torch

    kept = [torch.empty(int(gb * 1e9), dtype=torch.uint8, device=f"cuda:{index}") for index in range(gpus)]
    print(READY, flush=True)
    sys.stdin.read()
    del kept


HARNESS = "memory"
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
_LOG_LEVEL = "+actor_rollout_ref.rollout.engine_kwargs.sglang.log_level=info"  # SGLang then says how many tokens fit


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = common.parser_of(HARNESS, __doc__)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--ballast-gb", type=float, default=0.0, help="taken of every device before a try")
    parser.add_argument("--shares", default="0.95,0.9,0.85,0.8,0.7,0.6", help="of the memory, to be tried")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--override", action="append", default=[], help="a Hydra override for all ways")
    parser.add_argument(
        "--timeout", type=float, default=350.0, help="seconds per try, which says nothing if they end it"
    )
    parser.add_argument("--budget", type=float, help="seconds for all tries; one starts only with --timeout left")
    args = parser.parse_args(argv)
    args.ways, args.shares = args.ways.split(","), [float(share) for share in args.shares.split(",")]
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; choose from {', '.join(WAYS)}")
    if args.device == "cpu" and args.ballast_gb:
        parser.error("--ballast-gb: takes memory of a GPU, and --device cpu has none")
    return args


def case_of(args: argparse.Namespace, way: str, share: float) -> phase.Case:
    """The phase's case of one try; the level of SGLang's log is of both variants on a GPU, on a CPU it has one."""
    said = () if args.device == "cpu" else (_LOG_LEVEL,)
    return phase.Case(
        name=f"{args.case}-{way}-{share}", model_size=args.model_size, gpus=args.gpus, strategy="fsdp2",
        rollout_tp=args.rollout_tp, train_tp=1, train_pp=1, lora_rank=0, steps=args.steps, bucket_mb=args.bucket_mb,
        device=args.device, extra=(f"{_SHARE}={share}", *said, *args.override), plugin_extra=WAYS[way][1],
    )  # fmt: skip


def attempt(
    args: argparse.Namespace, way: str, share: float, paths: phase.Paths, work: Path
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """One try: what became of it, and the run where it survived. None: its limit ended it, and memory did not."""
    case, variant = case_of(args, way, share), WAYS[way][0]
    if args.device == "cuda" and not common.wait_until_idle():
        print("warning: device memory is still in use before the ballast", file=sys.stderr)
    started = time.monotonic()
    with ballast(args.ballast_gb, args.gpus):
        run = phase.run_variant(case, variant, paths, work, args.timeout, idle=False)
    # a run that its limit ended has not survived, although the phase's harness may count it
    survived = run is not None and run["settings"]["exit_status"] == 0
    path = work / f"{case.name}-{variant}.log"
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found: dict[str, Any] = {"way": way, "share": share, "survived": survived, "kv_tokens": kv_tokens(log)}
    found["reason"] = "" if survived else reason(log)
    if not survived and time.monotonic() - started >= args.timeout and not ran_out(log):
        return None, None
    if run is None or not survived:
        return found, None
    run["settings"].update(harness=HARNESS, way=way, share=share, ballast_gb=args.ballast_gb)
    return found, run


def measure(args: argparse.Namespace, work: Path) -> int:
    """Tries until every way has survived or has nothing left to try; returns 1 when the time was over before."""
    end = time.monotonic() + args.budget if args.budget else None
    attempts, runs = list[dict[str, Any]](), list[dict[str, Any]]()
    paths = phase.prepare(case_of(args, args.ways[0], args.shares[0]), work)
    for way, share in pending(attempts, args.ways, args.shares):
        if end is not None and end - time.monotonic() < args.timeout:
            print(f"no time left for {way} {share}", file=sys.stderr, flush=True)
            return 1
        found, run = attempt(args, way, share, paths, work)
        if found is None:
            print(f"{way} {share} was ended by --timeout {args.timeout:.0f}: raise it", file=sys.stderr, flush=True)
            return 1
        attempts.append(found)
        runs += [run] if run is not None else []
        print(json.dumps(found), flush=True)
        result = common.result_of(args.case, command_line("memory", args), runs, attempts=attempts)
        common.write_result(args.out, result)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measures one case; returns the exit status."""
    args = arguments(argv)
    return measure(args, common.work_of(args))


if __name__ == "__main__":
    sys.exit(main())
