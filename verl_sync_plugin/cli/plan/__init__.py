# SPDX-License-Identifier: Apache-2.0
"""``verl-sync plan MODEL``: what a sync of a model would move, take and last, from the model's config alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

SCHEMA = 1  # of the JSON; raised when a key changes its meaning or goes


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand to argparse's ``subparsers``, and returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="what a sync of a model would move, take and last",
        description="Reads a model's config only: a folder with config.json, or a name on the Hub. Counts every "
        "parameter in bf16, without adapters. The exit code is 1 with a warning, 2 for a wrong option or model.",
    )
    parser.add_argument("model", help="a folder with config.json, or a name on the Hub")
    parser.add_argument(
        "--trainer", choices=("fsdp2", "fsdp", "megatron"), default="fsdp2", help="the actor's strategy"
    )
    parser.add_argument("--world", type=int, default=8, help="trainer ranks (GPUs); default 8")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        default = None if name == "etp" else 1
        parser.add_argument(f"--{name}", type=int, default=default, help=f"Megatron's {what} parallel size")
    parser.add_argument("--rollout-tp", type=int, default=1, help="tensor parallel size of the engine")
    parser.add_argument(
        "--delivery", default="auto", help="auto, direct, sharded, exchanged (nodes), gathered, broadcast (apart)"
    )
    parser.add_argument("--bucket-mb", default=None, help="MiB (default 512), or auto with --spare-gb")
    parser.add_argument("--spare-gb", type=float, help="GiB that trainer and awake engine leave free on each GPU")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--link", choices=("nvlink", "pcie"), default="nvlink", help="between the GPUs of a node")
    parser.add_argument("--gpu-memory-gb", type=float, default=0.0, help="GiB of one GPU, to be warned of an OOM")
    parser.add_argument("--memory-fraction", type=float, default=0.5, help="rollout.gpu_memory_utilization")
    parser.add_argument("--reserve-gb", type=float, default=4.0, help="GiB left for CUDA contexts and activations")
    parser.add_argument("--param-offload", action="store_true")
    parser.add_argument("--optimizer-offload", action="store_true")
    parser.add_argument("--no-sleep", action="store_true", help="the engine never sleeps (free_cache_engine=False)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead (docs/plan.md)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand with its parsed arguments; the result is the exit code.

    Raises:
        ValueError: an option or the model is refused; names it, its value and the remedy.
    """
    from verl_sync_plugin.cli.plan import options, output

    found = {"schema": SCHEMA, **options.plan(options.read(arguments))}
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else output.as_text(found))
    return 1 if found["warnings"] else 0
