# SPDX-License-Identifier: Apache-2.0
"""``verl-sync prove``: shows on the user's own model and machine that a sync brings the trainer's weights.

A real engine, a real trainer's model and the real phase; the judges share no code with what moves the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand to argparse's ``subparsers``, and returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prove",
        help="show on a model and this machine that a sync brings the trainer's weights into the engine",
        description="Starts SGLang with the checkpoint, has it fill its weights with random numbers, syncs them back "
        "from a trainer that holds the same checkpoint, and compares all parameters with SGLang's own load, and "
        "log-probabilities of fixed prompts with the trainer's. With --tp 2 under torchrun --nproc-per-node 2 -m "
        "verl_sync_plugin.cli. The exit code is 1 where anything differs, or could not be compared at all, else 0.",
    )
    parser.add_argument("model", help="folder of a HF checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the engine; as many processes")
    parser.add_argument("--syncs", type=int, default=3, help="each after its own reset of the engine's weights")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--trainer-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of the engine")
    parser.add_argument("--threshold", type=float, default=0.03, help="on the mean difference of log-probabilities")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of each response")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand with its parsed arguments; the result is the exit code.

    Raises:
        ValueError: an option has a value that is refused; names option, value and remedy.
    """
    for option in ("tp", "syncs", "prompts", "tokens"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option} {getattr(arguments, option)}: use 1 or more")
    if not os.path.isfile(os.path.join(arguments.model, "config.json")):
        raise ValueError(
            f"{arguments.model}: no folder with a config.json; download the checkpoint and name its folder"
        )
    if arguments.tp != (world := int(os.environ.get("WORLD_SIZE", "1"))):
        raise ValueError(
            f"--tp {arguments.tp} with {world} processes: start as many as the engine has ranks, with torchrun "
            f"--nproc-per-node {arguments.tp} -m verl_sync_plugin.cli prove {arguments.model} --tp {arguments.tp}"
        )
    from verl_sync_plugin.cli.prove.checks import prove

    with _log_apart() if arguments.json else nullcontext():
        checks = prove(arguments)
    passed = all(check.passed for check in checks)
    if os.environ.get("RANK", "0") == "0":
        found = {
            "model": arguments.model,
            "passed": passed,
            # of the syncs' own proofs, the one that shows least
            "compared": min((check.compared for check in checks if check.compared is not None), default=0),
            "not_comparable": max((check.not_comparable or 0 for check in checks), default=0),
            "checks": [check.as_dict() for check in checks],
        }
        print(json.dumps(found, indent=2) if arguments.json else table(found))
    return 0 if passed else 1


@contextmanager
def _log_apart() -> Iterator[None]:
    """What this process and the engine's print goes to the standard error, so that the output is JSON alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def table(found: dict[str, Any]) -> str:
    """What was checked, one line each, and what that proves."""
    width = max(len(check["check"]) for check in found["checks"])
    lines = []
    for check in found["checks"]:
        held = "partly" if check["not_comparable"] else "ok"
        result = "skipped" if check["skipped"] else (held if check["passed"] else "FAILED")
        lines.append(f"{check['check']:{width}}  {result:7}  {check['found']}")
    return "\n".join([*lines, "", _verdict(found)])


def _verdict(found: dict[str, Any]) -> str:
    if not found["passed"]:
        return "NOT proven"
    if not found["not_comparable"]:
        return "proven"
    return (
        f"proven by the digests of all parameters; the syncs themselves compared {found['compared']} tensors in the "
        f"engine, and could not compare {found['not_comparable']}"
    )
