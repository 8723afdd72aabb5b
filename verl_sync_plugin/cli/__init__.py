# SPDX-License-Identifier: Apache-2.0
"""The console command ``verl-sync``: a module per subcommand, with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence

COMMANDS = ("doctor", "prove", "report")


def parser_of(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Knows the command that is asked for, so that the doctor also starts where the package is broken; else all."""
    from verl_sync_plugin import build

    parser = argparse.ArgumentParser(prog="verl-sync", description="weight sync for verl: checks, proofs and reports")
    parser.add_argument("--version", action="version", version=f"verl-sync {build()}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name in [each for each in COMMANDS if each in argv[:1]] or COMMANDS:
        command = importlib.import_module(f"verl_sync_plugin.cli.{name}")
        command.add_parser(subparsers).set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code. A ``ValueError`` is the user's to mend: it is printed in one line, and
    the exit code is 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(argv)
    arguments = parser.parse_args(argv)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # importing verl lists the engines that are not installed
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        parser.exit(2, f"verl-sync {arguments.command}: {error}\n")
