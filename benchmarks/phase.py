# SPDX-License-Identifier: Apache-2.0
"""Measures one case: the same training under stock verl and under the plugin, one after the other on one machine.

``python -m benchmarks.phase --case dense-7b-2gpu-fsdp2-tp2-full --model-size 7b --gpus 2 --strategy fsdp2
--rollout-tp 2 --steps 3 --bucket-mb 512 --variants stock,plugin --out results.json``

phase = the rollout's sleep + the trainer's whole ``update_weights`` call, the slowest rank's, by the same clock for
both variants: what a variant moves from one stage into another stays in the sum.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cases, command, launch, machine, models, parse, phase_profile, profiling, schema

ROWS_PER_STEP = 16
LEAST_RUN_SECONDS = 60.0
LEAST_SYNCS = 3  # of a run that its time limit ended: then they count, and its exit status is in its settings
# what says nothing about the measurement, only where its files lay
LOCAL_ARGUMENTS = ("tokenizer_dir", "work", "out", "timeout", "budget", "profile")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ROLLOUT = re.compile(r"response_length/mean:([0-9.eE+-]+).*?timing_s/gen:([0-9.eE+-]+)")
_TIMING = re.compile(r"timing_s/update_weights:([0-9.eE+-]+)")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--strategy", choices=cases.STRATEGIES, default="fsdp2")
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--train-tp", type=int, default=1, help="Megatron only")
    parser.add_argument("--train-pp", type=int, default=1, help="Megatron only")
    for axis, default in (("vpp", 1), ("cp", 1), ("ep", 1), ("etp", 0)):
        parser.add_argument(f"--train-{axis}", type=int, default=default, help="Megatron only")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: full parameters; else LoRA with lora.merge=True")
    parser.add_argument("--steps", type=int, default=3, help="training steps; each gives one measured sync")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--variants", default="stock,plugin")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--timeout", type=float, default=270.0, help=f"seconds per run; then it is ended, and needs {LEAST_SYNCS} syncs"
    )
    parser.add_argument("--budget", type=float, help="seconds for all runs together; a run starts only with 60 s left")
    parser.add_argument("--tokenizer-dir", type=Path, help="default: a tokenizer with a token per byte")
    parser.add_argument("--work", type=Path, help="folder for model, prompts, probe files and logs; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="also trace a sync, after the measured ones; two more steps"
    )
    parser.add_argument("--override", action="append", default=[], help="a Hydra override for both variants")
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    unknown = [name for name in args.variants if name not in command.VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(command.VARIANTS)}")
    if args.steps < 1 or args.repeat < 1:
        parser.error("--steps and --repeat must be at least 1")
    return args


def case_of(args: argparse.Namespace) -> cases.Case:
    """The case that the command line describes."""
    values = vars(args)
    fields = {field.name for field in dataclasses.fields(cases.Case)} - {"name", "extra"}
    return cases.Case(name=args.case, extra=tuple(args.override), **{name: values[name] for name in fields})


def prepare(case: cases.Case, work: Path, tokenizer_dir: Path | None) -> cases.Paths:
    """Makes the case's prompts, and the model where there is none whole, in a process whose device memory goes back."""
    paths = cases.Paths(model=work / f"model-{case.model_size}", prompts=work / "prompts.parquet")
    # another case may have left prompts for fewer steps, and its run would end early
    models.write_prompts(paths.prompts, ROWS_PER_STEP * (case.steps + 1 + phase_profile.EXTRA_SYNCS))
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


def _verl_timings(log: Path) -> list[float]:
    """verl's own ``timing_s/update_weights`` of each step: a second clock, independent of the probe."""
    return [float(value) for value in _TIMING.findall(_ANSI.sub("", log.read_text(encoding="utf-8", errors="replace")))]


def _rollouts(settings: dict[str, Any], log: Path) -> list[dict[str, float]]:
    """Seconds and generated tokens of each step's rollout, from verl's console metrics."""
    text = _ANSI.sub("", log.read_text(encoding="utf-8", errors="replace"))
    device = settings.get("device", "cuda")
    responses = cases.batch_of(device) * cases.samples_of(device)
    return [
        {"seconds": float(seconds), "tokens": float(length) * responses} for length, seconds in _ROLLOUT.findall(text)
    ]


def _biggest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def summarize(variant: str, settings: dict[str, Any], probe_file: Path, log: Path) -> dict[str, Any]:
    """One entry of ``runs``, from what the run left behind.

    Raises:
        ProbeError: the probe file is incomplete, or shows the other variant: verl drops a plugin that fails to load.
    """
    records = parse.read(probe_file)
    first, *measured = parse.syncs(records)
    steps = settings.get("steps")  # what follows was run to be traced
    stock = parse.adapter_classes(records) == {parse.STOCK_ADAPTER}
    if stock != (variant == "stock"):
        raise parse.ProbeError(f"not a {variant} run: weights came from {sorted(parse.adapter_classes(records))}")
    return {
        "variant": variant,
        "settings": settings,
        "stages": parse.medians(measured[:steps]),
        "samples": {
            "first_sync": dataclasses.asdict(first),
            "syncs": [dataclasses.asdict(sync) for sync in measured[:steps]],
            "verl_update_weights_s": _verl_timings(log)[:steps],
            "rollouts": _rollouts(settings, log)[:steps],
        },
        "bytes": _biggest([sync.bytes for sync in (first, *measured[:steps])]),
        "peak_device_bytes": _biggest([sync.peak_device_bytes for sync in measured[:steps]]),
        "peak_host_bytes": max(sync.peak_host_bytes for sync in measured[:steps]),
    }


def _importable(work: Path) -> Path:
    """A folder from which every process of the training can import the probe, and nothing else of the checkout."""
    folder = work / "importable"
    folder.mkdir(exist_ok=True)
    link = folder / "benchmarks"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).resolve().parent)
    return folder


def run_variant(
    case: cases.Case, variant: str, repeat: int, paths: cases.Paths, work: Path, timeout: float, profile: bool
) -> dict[str, Any] | None:
    """Runs and summarizes one training; None, with the end of its log on stderr, when it failed."""
    stem = f"{case.name}-{variant}-{repeat}"
    probe_file, log = work / f"{stem}.jsonl", work / f"{stem}.log"
    probe_file.unlink(missing_ok=True)
    if case.device == "cuda" and not machine.wait_until_idle():
        print("warning: device memory is still in use; the run may lack memory", file=sys.stderr)
    longer = dataclasses.replace(case, steps=case.steps + (phase_profile.EXTRA_SYNCS if profile else 0))
    line = command.training(longer, variant, paths)
    env = command.environment(case, variant, probe_file, os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_importable(work)), env.get("PYTHONPATH"))))
    if profile:
        env.update(phase_profile.environment(work / f"{stem}-traces", case.steps))
    print(f"[{stem}] {shlex.join(line)}", flush=True)
    status, seconds = launch.run(line, env, log, timeout, work)
    print(f"[{stem}] status {status} after {seconds:.0f} s", flush=True)
    settings = {**dataclasses.asdict(case), "repeat": repeat, "exit_status": status, "run_seconds": round(seconds, 1)}
    try:
        if status not in (0, launch.TIMED_OUT):
            raise parse.ProbeError(f"exit status {status}")
        if status == launch.TIMED_OUT:
            parse.check_cut_short(parse.read(probe_file), time.time(), LEAST_SYNCS)
        return summarize(variant, settings, probe_file, log)
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
        summary = phase_profile.collect(work / f"{stem}-{run['settings']['repeat']}-traces", args.profile, stem)
    except (ValueError, OSError) as error:
        print(f"[{stem}] no profile: {error}", file=sys.stderr, flush=True)
        return
    profiles.append({**where, **summary})
    profiling.write(args.profile, result, profiles)


def command_line(args: argparse.Namespace) -> str:
    """The command that measures the same again, without the paths of this machine."""
    words = ["python", "-m", "benchmarks.phase"]
    for name, value in vars(args).items():
        if name in LOCAL_ARGUMENTS or name == "override":
            continue
        words += [f"--{name.replace('_', '-')}", ",".join(value) if name == "variants" else str(value)]
    return shlex.join([*words, *(f"--override={value}" for value in args.override)])


def measure(case: cases.Case, args: argparse.Namespace, work: Path) -> int:
    """Runs every variant as often as asked and writes the result after each; returns how many runs failed."""
    end = time.monotonic() + args.budget if args.budget else None
    paths = prepare(case, work, args.tokenizer_dir)
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
        result = machine.result(case.name, command_line(args), runs)
        assert not schema.problems(result), schema.problems(result)
        # written after every run: a visit that is cut short keeps what it measured
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.profile is not None:
            collect_profile(case, args, work, result, profiles)
    return failed


def main(argv: list[str] | None = None) -> int:
    """Measures the case; returns 1 when a run failed, after writing what did succeed."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-bench-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    return 1 if measure(case_of(args), args, work) else 0


if __name__ == "__main__":
    sys.exit(main())
