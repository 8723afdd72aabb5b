# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor``: whether the plugin is active in this environment."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from typing import Any

from verl_sync_plugin import __version__

PACKAGES = (
    "verl",
    "sglang",
    "torch",
    "transformers",
    "ray",
    "hydra-core",
    "torch-memory-saver",
    "peft",
    "megatron-core",
    "megatron-bridge",
    "mbridge",
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand to argparse's ``subparsers``, and returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="versions on this machine, and whether verl here loads the plugin"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand with its parsed arguments; the result is the exit code."""
    return doctor()


def doctor() -> int:
    """Prints the versions on this machine, and whether verl here uses the plugin's rollout adapter; 0 when it does.

    Looks neither at GPUs nor at the keys of a run, nor at other machines.
    """
    print(f"verl-sync-plugin {__version__}")
    for package in PACKAGES:
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package} is not installed")
    problems = _problems()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("ready" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _problems() -> list[str]:
    found = []
    points = [p.value for p in importlib.metadata.entry_points(group="verl.plugins")]
    if "verl_sync_plugin.plugin" not in points:
        found.append("no entry point in the group verl.plugins: install the package with pip instead of PYTHONPATH")
    for module in ("verl", "sglang"):
        if importlib.util.find_spec(module) is None:
            found.append(f"{module} is not installed: pip install it first")
    if found:
        return found
    try:
        import verl  # noqa: F401  (loads the plugin)
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY

        from verl_sync_plugin.registered import MODE
        from verl_sync_plugin.rollouts import ROLLOUTS, rollout_of
    except (ImportError, SystemExit) as error:
        return [str(error)]
    for name in ROLLOUTS:
        if (adapter := _ROLLOUT_REGISTRY[name, MODE]) != rollout_of(name).adapter:
            found.append(
                f"verl's rollout adapter for {name} is {adapter}: "
                "unset VERL_USE_EXTERNAL_PLUGINS, or uninstall the other plugin"
            )
    return found
