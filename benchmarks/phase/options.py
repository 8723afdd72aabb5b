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
from pathlib import Path

from benchmarks import models
from benchmarks.phase.cases import BRIDGES, STRATEGIES, Case
from benchmarks.schema import VARIANTS

LEAST_SYNCS = 3  # of a run that its time limit ended: then they count, and its exit status is in its settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.phase", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model-size", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp2")
    parser.add_argument("--rollout-tp", type=int, default=1)
    help_of_own = "its own, beside --gpus; stock is then verl's engine nccl"
    parser.add_argument("--rollout-gpus", type=int, default=0, help=help_of_own)
    for axis, default in (("tp", 1), ("pp", 1), ("vpp", 1), ("cp", 1), ("ep", 1), ("etp", 0)):
        parser.add_argument(f"--train-{axis}", type=int, default=default, help="Megatron only")
    parser.add_argument("--bridge", choices=BRIDGES, default=BRIDGES[0], help="Megatron only; default: verl's")
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
    parser.add_argument(
        "--plugin-override",
        action="append",
        default=[],
        help="one for the plugin alone: stock refuses the plugin's keys",
    )
    return parser


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if bool(args.rollout_gpus) != args.case.startswith("separate-"):
        parser.error(f"--case {args.case}: names of cases with --rollout-gpus, and no others, begin with separate-")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(VARIANTS)}")
    if args.strategy == "megatron" and args.bridge == BRIDGES[0] and "-bridge" not in args.case:
        parser.error(f"--case {args.case}: with --bridge {args.bridge} the name of the case says so, as in x-bridge-y")
    if args.steps < 1 or args.repeat < 1:
        parser.error("--steps and --repeat must be at least 1")
    return args


def case_of(args: argparse.Namespace) -> Case:
    """The case that the command line describes."""
    values = vars(args)
    fields = {field.name for field in dataclasses.fields(Case)} - {"name", "extra", "plugin_extra"}
    extra, ours = tuple(args.override), tuple(args.plugin_override)
    return Case(name=args.case, extra=extra, plugin_extra=ours, **{name: values[name] for name in fields})
