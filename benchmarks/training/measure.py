# SPDX-License-Identifier: Apache-2.0
"""Trains the same model from the same seed on the same data with stock verl and with the plugin, by GRPO.

``python -m benchmarks.training --case training-small-1gpu --model-size small --steps 40 --stock-runs 2 --out FILE``

Sampling repeats itself in no two runs, of stock verl neither: several stock runs show how far apart they are, and only
what lies outside of that could be the plugin's doing. With ``--greedy`` nothing is sampled, and runs can be compared
number for number. A run is one of the phase's harness (``phase/``) with a reward
that can be raised; which learning rate raises it is to be found (``--lr``).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, models, schema
from benchmarks.command import command_line
from benchmarks.phase import cases
from benchmarks.phase import measure as phase
from benchmarks.training import metrics

HARNESS = "training"
LEAST_STEPS = 20  # of a run that its limit ends
REWARD = Path(__file__).resolve().parent / "reward.py"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), default="small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stock-runs", type=int, default=2, help="two show how far apart stock runs are")
    parser.add_argument("--plugin-runs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--response", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--greedy", action="store_true", help="the likeliest tokens, one answer to a prompt at a time")
    parser.add_argument("--beside", action="store_true", help="others use the device, too: curves need no clock")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout", type=float, default=270.0, help="seconds per run")
    parser.add_argument("--budget", type=float, help="seconds for all runs together; a run starts only with 60 s left")
    parser.add_argument("--work", type=Path, help="folder for model, prompts and logs; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.steps < 2 or args.stock_runs + args.plugin_runs < 1:
        parser.error("--steps: at least 2; --stock-runs and --plugin-runs: at least 1 together")
    return args


# One answer is like another then, so one to a prompt; and alone, for sums in a batch depend on how large it is, and on
# which part of a prompt an earlier one has left in the cache
GREEDY = (
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix_cache=True",
)


def case_of(args: argparse.Namespace) -> cases.Case:
    """The phase's case: one device, FSDP2, all parameters, and what makes the training learn and repeat itself."""
    answers = cases.batch_of(args.device) * (1 if args.greedy else cases.samples_of(args.device))
    share = () if args.device == "cpu" else ("actor_rollout_ref.rollout.gpu_memory_utilization=0.15",)
    extra = (
        *share,
        f"actor_rollout_ref.actor.optim.lr={args.lr}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={answers}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={answers}",
        f"data.max_response_length={args.response}",
        f"data.seed={args.seed}",
        f"actor_rollout_ref.actor.data_loader_seed={args.seed}",
        f"actor_rollout_ref.rollout.seed={args.seed}",
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed={args.seed}",
        *(GREEDY if args.greedy else ()),
    )
    return cases.Case(
        name=args.case, model_size=args.model_size, gpus=1, strategy="fsdp2", rollout_tp=1, train_tp=1, train_pp=1,
        lora_rank=0, steps=args.steps, bucket_mb=512, device=args.device, extra=extra,
    )  # fmt: skip


def order(stock: int, plugin: int) -> list[tuple[str, int]]:
    """Variant and repeat of every run: in turns, stock first."""
    turns = itertools.zip_longest(range(stock), range(plugin))
    pairs = [(("stock", one), ("plugin", other)) for one, other in turns]
    return [(variant, repeat) for pair in pairs for variant, repeat in pair if repeat is not None]


def train(
    case: cases.Case, variant: str, repeat: int, paths: cases.Paths, work: Path, limit: float, idle: bool = True
) -> dict[str, Any] | None:
    """One training with what its steps printed; None where it failed, printed too little or has no time left."""
    if limit < phase.LEAST_RUN_SECONDS:
        print(f"no time left for {variant} {repeat}", file=sys.stderr, flush=True)
        return None
    run = phase.run_variant(case, variant, repeat, paths, work, limit, profile=False, idle=idle)
    if run is None:
        return None
    log = work / f"{case.name}-{variant}-{repeat}.log"
    steps = metrics.steps_of(log.read_text(encoding="utf-8", errors="replace"))
    cut_short = bool(run["settings"]["exit_status"]) and len(steps) >= LEAST_STEPS
    found = metrics.problems(steps, len(steps) if cut_short else case.steps)
    if found:
        print(f"[{case.name}] {variant} {repeat} FAILED: {'; '.join(found)}", file=sys.stderr, flush=True)
        return None
    run["settings"]["harness"] = HARNESS
    # the stages of every sync are the phase's to show: here they would make the file ten times as large
    run["samples"] = {"syncs": steps}
    return run


def measure(args: argparse.Namespace, work: Path) -> int:
    """Trains every run and writes the result after each; returns how many failed."""
    end = time.monotonic() + args.budget if args.budget else math.inf
    case = case_of(args)
    paths = dataclasses.replace(phase.prepare(case, work, None), reward=REWARD)
    runs: list[dict[str, Any]] = []
    failed = 0
    for variant, repeat in order(args.stock_runs, args.plugin_runs):
        limit = min(args.timeout, end - time.monotonic())
        run = train(case, variant, repeat, paths, work, limit, idle=not args.beside)
        if run is None:
            failed += 1
            continue
        runs.append(run)
        first, last = (run["samples"]["syncs"][place]["reward"] for place in (0, -1))
        print(json.dumps({"case": case.name, "variant": variant, "reward": [first, last]}), flush=True)
        result = machine.result(args.case, command_line("training", args), runs)
        assert not schema.problems(result), schema.problems(result)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return failed


def main(argv: list[str] | None = None) -> int:
    """Measures the case; returns 1 when a run failed, after writing what did succeed."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-training-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    return 1 if measure(args, work) else 0
