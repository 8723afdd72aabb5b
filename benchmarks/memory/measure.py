# SPDX-License-Identifier: Apache-2.0
"""Searches the highest ``gpu_memory_utilization`` with which a training survives, stock and plugin, on a full device.

``python -m benchmarks.memory --case memory-7b-2gpu --model-size 7b --gpus 2 --rollout-tp 2 --ballast-gb 61 --out FILE``

Every try is a training of the phase's harness (``phase/``) beside a process that holds the ballast. Of each way the
shares are tried from the highest until one survives. The result is written after each try; the same command goes on
where an earlier one ended, with what lies in ``--out`` or in ``benchmarks/results/CASE.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, models, schema
from benchmarks.command import command_line
from benchmarks.memory import ballast, search
from benchmarks.phase import cases
from benchmarks.phase import measure as phase

HARNESS = "memory"
RESULTS = Path(__file__).resolve().parents[1] / "results"
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
_LOG_LEVEL = "+actor_rollout_ref.rollout.engine_kwargs.sglang.log_level=info"  # SGLang then says how many tokens fit


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--ballast-gb", type=float, default=0.0, help="taken of every device before a try")
    parser.add_argument("--shares", default="0.95,0.9,0.85,0.8,0.7,0.6", help="of the memory, to be tried")
    parser.add_argument("--ways", default=",".join(search.WAYS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--override", action="append", default=[], help="a Hydra override for all ways")
    parser.add_argument(
        "--timeout", type=float, default=350.0, help="seconds per try, which says nothing if they end it"
    )
    parser.add_argument("--budget", type=float, help="seconds for all tries; one starts only with --timeout left")
    parser.add_argument("--work", type=Path, help="folder for model, prompts and logs; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.ways, args.shares = args.ways.split(","), [float(share) for share in args.shares.split(",")]
    if unknown := set(args.ways) - set(search.WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; choose from {', '.join(search.WAYS)}")
    if args.device == "cpu" and args.ballast_gb:
        parser.error("--ballast-gb: takes memory of a GPU, and --device cpu has none")
    return args


def case_of(args: argparse.Namespace, way: str, share: float) -> cases.Case:
    """The phase's case of one try; the level of SGLang's log is of both variants on a GPU, on a CPU it has one."""
    said = () if args.device == "cpu" else (_LOG_LEVEL,)
    return cases.Case(
        name=f"{args.case}-{way}-{share}", model_size=args.model_size, gpus=args.gpus, strategy="fsdp2",
        rollout_tp=args.rollout_tp, train_tp=1, train_pp=1, lora_rank=0, steps=args.steps, bucket_mb=args.bucket_mb,
        device=args.device, extra=(f"{_SHARE}={share}", *said, *args.override), plugin_extra=search.WAYS[way][1],
    )  # fmt: skip


def attempt(
    args: argparse.Namespace, way: str, share: float, paths: cases.Paths, work: Path
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """One try: what became of it, and the run where it survived. None: its limit ended it, and memory did not."""
    case, variant = case_of(args, way, share), search.WAYS[way][0]
    if args.device == "cuda" and not machine.wait_until_idle():
        print("warning: device memory is still in use before the ballast", file=sys.stderr)
    started = time.monotonic()
    with ballast.held(args.ballast_gb, args.gpus):
        run = phase.run_variant(case, variant, 0, paths, work, args.timeout, profile=False, idle=False)
    # a run that its limit ended has not survived, although the phase's harness may count it
    survived = run is not None and run["settings"]["exit_status"] == 0
    path = work / f"{case.name}-{variant}-0.log"
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found: dict[str, Any] = {"way": way, "share": share, "survived": survived, "kv_tokens": search.kv_tokens(log)}
    found["reason"] = "" if survived else search.reason(log)
    if not survived and time.monotonic() - started >= args.timeout and not search.ran_out(log):
        return None, None
    if run is None or not survived:
        return found, None
    run["settings"].update(harness=HARNESS, way=way, share=share, ballast_gb=args.ballast_gb)
    return found, run


def earlier(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Attempts and runs of the same command on the same commit, from ``--out`` or from the results of the checkout."""
    for path in (args.out, RESULTS / f"{args.case}.json"):
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            if (result["command"], result["commit"]) == (command_line("memory", args), machine.commit()):
                return result["attempts"], result["runs"]
            print(f"{path.name} is of another command or commit: not continued", file=sys.stderr, flush=True)
    return [], []


def measure(args: argparse.Namespace, work: Path) -> int:
    """Tries until every way has survived or has nothing left to try; returns 1 when the time was over before."""
    end = time.monotonic() + args.budget if args.budget else None
    attempts, runs = earlier(args)
    paths = phase.prepare(case_of(args, args.ways[0], args.shares[0]), work, None)
    for way, share in search.pending(attempts, args.ways, args.shares):
        if end is not None and end - time.monotonic() < args.timeout:
            print(f"no time left for {way} {share}: the same command goes on there", file=sys.stderr, flush=True)
            return 1
        found, run = attempt(args, way, share, paths, work)
        if found is None:
            print(f"{way} {share} was ended by --timeout {args.timeout:.0f}: raise it", file=sys.stderr, flush=True)
            return 1
        attempts.append(found)
        runs += [run] if run is not None else []
        print(json.dumps(found), flush=True)
        result = {**machine.result(args.case, command_line("memory", args), runs), "attempts": attempts}
        assert not schema.problems(result), schema.problems(result)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measures one case; returns the exit status."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-memory-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    return measure(args, work)
