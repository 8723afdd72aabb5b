# SPDX-License-Identifier: Apache-2.0
"""The console command ``verl-sync``: one module per subcommand, with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import sys
import warnings

from verl_sync_plugin.cli import doctor, prove, report

COMMANDS = (doctor, prove, report)  # in the order in which --help lists them


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs its subcommand; the result is the exit code.

    A ``ValueError`` of a subcommand is the user's to mend: it is printed in one line, and the exit code is 2.
    """
    parser = argparse.ArgumentParser(prog="verl-sync", description="weight sync for verl: checks, proofs and reports")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # importing verl tells at length of the engines that are not installed
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        parser.exit(2, f"verl-sync {arguments.command}: {error}\n")
