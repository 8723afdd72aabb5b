# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor``: whether the plugin will move the weights here, and what of the machine stands in its way.

Nothing of the plugin that a broken installation could miss is imported before it is looked at, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand to argparse's ``subparsers``, and returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="whether the plugin is active in this environment, and what of the machine stands in its way",
        description="Loads every hook in a fresh process as verl would, and looks at GPUs, variables and limits. Each "
        "finding that is not ok has a remedy. The exit code is 1 where there is a problem, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead (docs/doctor.md)")
    parser.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="also every node of a Ray cluster")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="after --: a run's overrides, to be checked")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand with its parsed arguments; the result is the exit code."""
    from verl_sync_plugin.cli.doctor import output, versions
    from verl_sync_plugin.cli.doctor.findings import problem
    from verl_sync_plugin.cli.doctor.node import check_node

    here = {"node": f"this machine ({os.uname().nodename})", "address": "", **check_node(arguments.overrides)}
    nodes, between = [here], []
    if arguments.ray is not None:
        from verl_sync_plugin.cli.doctor.cluster import NoClusterError, check_cluster

        try:
            nodes += check_cluster(arguments.ray)
            known = [(str(each["node"]), each["versions"]) for each in nodes if each["versions"]]
            between = versions.differences(known)
        except NoClusterError as error:
            remedy = "ray start --head, or give its address: --ray HOST:6379"
            between = [problem("ray", f"no Ray cluster at {error}", remedy)]
    found = output.result(nodes, between)
    print(output.as_json(found) if arguments.json else output.as_text(found))
    return 0 if found["ready"] else 1
