# SPDX-License-Identifier: Apache-2.0
"""The console command ``verl-sync``: a module per subcommand, with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import sys
import warnings


def parser_of_all() -> argparse.ArgumentParser:
    from verl_sync_plugin import build
    from verl_sync_plugin.cli import doctor, prove, report

    parser = argparse.ArgumentParser(prog="verl-sync", description="weight sync for verl: checks, proofs and reports")
    parser.add_argument("--version", action="version", version=f"verl-sync {build()}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, prove, report):
        command.add_parser(subparsers).set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code. A ``ValueError`` is the user's to mend: it is printed in one line, and
    the exit code is 2."""
    parser = parser_of_all()
    arguments = parser.parse_args(argv)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # importing verl lists the engines that are not installed
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        parser.exit(2, f"verl-sync {arguments.command}: {error}\n")
