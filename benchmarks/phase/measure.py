# SPDX-License-Identifier: Apache-2.0
"""Trains once per variant and repeat, and writes the case's result after each run."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import launch, link, machine, models, profiling, schema
from benchmarks.command import command_line
from benchmarks.phase import cases, command, options, parse, summary, tracing

ROWS_PER_STEP = 16
LEAST_RUN_SECONDS = 60.0


def prepare(case: cases.Case, work: Path, tokenizer_dir: Path | None) -> cases.Paths:
    """Makes the case's prompts, and the model where there is none whole, in a process whose device memory goes back."""
    paths = cases.Paths(model=work / f"model-{case.model_size}", prompts=work / "prompts.parquet")
    # another case may have left prompts for fewer steps, and its run would end early
    models.write_prompts(paths.prompts, ROWS_PER_STEP * (case.steps + 1 + tracing.EXTRA_SYNCS))
    if (paths.model / models.DONE).exists():
        return paths
    build = [sys.executable, "-m", "benchmarks.models", "--size", case.model_size, "--out", str(paths.model)]
    build += ["--device", case.device]
    if tokenizer_dir is not None:
        build += ["--tokenizer-dir", str(tokenizer_dir)]
    # transformers imports torchvision, whose compiled part needs the CPU stack's help to load without CUDA
    platform = {"VERL_PLATFORM": "cpu"} if case.device == "cpu" else {}
    subprocess.run(build, env={**os.environ, **platform}, check=True)
    return paths


def _importable(work: Path) -> Path:
    """A folder from which every process of the training can import the probe, and nothing else of the checkout."""
    folder = work / "importable"
    folder.mkdir(exist_ok=True)
    link = folder / "benchmarks"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).resolve().parents[1])
    return folder


def run_variant(
    case: cases.Case,
    variant: str,
    repeat: int,
    paths: cases.Paths,
    work: Path,
    timeout: float,
    profile: bool,
    idle: bool = True,
) -> dict[str, Any] | None:
    """Runs and summarizes one training; None, with the end of its log on stderr, when it failed.

    ``idle``: whether the devices are waited for until nothing else holds their memory.
    """
    stem = f"{case.name}-{variant}-{repeat}"
    probe_file, log = work / f"{stem}.jsonl", work / f"{stem}.log"
    probe_file.unlink(missing_ok=True)
    if case.device == "cuda" and idle and not machine.wait_until_idle():
        print("warning: device memory is still in use; the run may lack memory", file=sys.stderr)
    longer = dataclasses.replace(case, steps=case.steps + (tracing.EXTRA_SYNCS if profile else 0))
    line = command.training(longer, variant, paths)
    env = command.environment(case, variant, probe_file, os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_importable(work)), env.get("PYTHONPATH"))))
    if profile:
        env.update(tracing.environment(work / f"{stem}-traces", case.steps))
    print(f"[{stem}] {shlex.join(line)}", flush=True)
    status, seconds = launch.run(line, env, log, timeout, work)
    print(f"[{stem}] status {status} after {seconds:.0f} s", flush=True)
    settings = {**dataclasses.asdict(case), "repeat": repeat, "exit_status": status, "run_seconds": round(seconds, 1)}
    try:
        if status not in (0, launch.TIMED_OUT):
            raise parse.ProbeError(f"exit status {status}")
        if status == launch.TIMED_OUT:
            parse.check_cut_short(parse.read(probe_file), time.time(), options.LEAST_SYNCS)
        return summary.summarize(variant, settings, probe_file, log)
    except (parse.ProbeError, OSError, ValueError) as error:
        tail = log.read_text(encoding="utf-8", errors="replace")[-6000:] if log.exists() else ""
        print(f"[{stem}] FAILED: {error}\n{tail}", file=sys.stderr, flush=True)
        return None


def collect_profile(
    case: cases.Case, args: argparse.Namespace, work: Path, result: dict[str, Any], profiles: list[dict[str, Any]]
) -> None:
    """Adds the profile of the last run to ``profiles`` and writes them; says so where there is none."""
    run = result["runs"][-1]
    stem = f"{case.name}-{run['variant']}"
    calls = [sync["outer"]["call"] for sync in run["samples"]["syncs"]]
    where = {"variant": run["variant"], "bucket_mb": case.bucket_mb, "unprofiled_seconds": statistics.median(calls)}
    try:
        traced = tracing.collect(work / f"{stem}-{run['settings']['repeat']}-traces", args.profile, stem)
    except (ValueError, OSError) as error:
        print(f"[{stem}] no profile: {error}", file=sys.stderr, flush=True)
        return
    profiles.append({**where, **traced})
    profiling.write(args.profile, result, profiles)


def measure(case: cases.Case, args: argparse.Namespace, work: Path) -> int:
    """Runs every variant as often as asked and writes the result after each; returns how many runs failed."""
    end = time.monotonic() + args.budget if args.budget else None
    paths = prepare(case, work, args.tokenizer_dir)
    rate = link.bytes_per_second() if case.rollout_gpus and case.device == "cuda" else None
    runs: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    failed = 0
    for repeat, variant in itertools.product(range(args.repeat), args.variants):
        limit = args.timeout if end is None else min(args.timeout, end - time.monotonic())
        if limit < LEAST_RUN_SECONDS:
            print(f"no time left for {variant} {repeat}", file=sys.stderr, flush=True)
            failed += 1
            continue
        run = run_variant(case, variant, repeat, paths, work, limit, profile=args.profile is not None)
        if run is None:
            failed += 1
            continue
        runs.append(run)
        print(json.dumps({"case": case.name, "variant": variant, "stages": run["stages"]}), flush=True)
        result = machine.result(case.name, command_line("phase", args), runs)
        if rate is not None:
            result["machine"]["link_bytes_per_second"] = rate
        assert not schema.problems(result), schema.problems(result)
        # written after every run: a visit that is cut short keeps what it measured
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.profile is not None:
            collect_profile(case, args, work, result, profiles)
    return failed


def main(argv: list[str] | None = None) -> int:
    """Measures the case; returns 1 when a run failed, after writing what did succeed."""
    args = options.arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-bench-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    return 1 if measure(options.case_of(args), args, work) else 0
