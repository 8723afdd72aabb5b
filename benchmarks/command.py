# SPDX-License-Identifier: Apache-2.0
"""The command of a measurement, as a result file keeps it."""

from __future__ import annotations

import argparse
import shlex

# What says nothing about the measurement: where files lie, how long it may take, and who else uses the machine
LOCAL = frozenset({"work", "out", "profile", "tokenizer_dir", "timeout", "budget", "beside"})
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
