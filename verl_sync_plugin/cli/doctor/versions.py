# SPDX-License-Identifier: Apache-2.0
"""Which versions are installed, which the plugin is made for, and which differ between nodes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_sync_plugin import __version__
from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning

Versions = Mapping[str, str | None]

PLUGIN = "verl-sync-plugin"
PACKAGES = (
    "verl",
    "sglang",
    "torch",
    "transformers",
    "ray",
    "hydra-core",
    "torch-memory-saver",
    "triton",
    "peft",
    "megatron-core",
    "megatron-bridge",
)


@dataclass(frozen=True)
class Range:
    """The versions of a package that the plugin is made for.

    Attributes:
        accepted: what it is made for (PEP 440); anything else is a problem.
        tried: what its tests ran with; what is accepted and was not tried is a warning.
        remedy: for both.
    """

    accepted: str
    tried: str
    remedy: str


UNTRIED_SGLANG = (15, 16, 17, 18, 19)  # of 0.5; see docs/releases.md
RANGES = {
    "verl": Range(">=0.9,<0.11", ">=0.9,<=0.9.1", "pip install verl==0.9.1"),
    "sglang": Range(">=0.5.12", f">=0.5.12,<=0.5.23,{','.join(f'!=0.5.{untried}' for untried in UNTRIED_SGLANG)}",
                    "pip install sglang==0.5.12, which verl 0.9.1 names itself"),
}  # fmt: skip
# Where nodes must have the same: what travels between their processes, or is computed alike on all
SAME_EVERYWHERE = (PLUGIN, "python", "verl", "sglang", "torch", "transformers", "ray", "megatron-core")


def installed() -> dict[str, str | None]:
    """The version of each package, ``None`` where it is not installed; also this Python's and the plugin's."""
    return {PLUGIN: __version__, "python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(versions: Versions, imported: Mapping[str, str]) -> list[Finding]:
    """What speaks against the versions.

    Args:
        versions: by package, from its metadata.
        imported: by package, ``__version__`` of the code that a fresh process imports; only of some.
    """
    found = []
    for package, ranged in RANGES.items():
        check, version = f"version/{package}", versions[package]
        if version is None:
            found.append(problem(check, f"{package} is not installed", ranged.remedy))
            continue
        if _public(version) != _public(imported.get(package, version)):
            text = f"the metadata of {package} say {version}, and the code that is imported says {imported[package]}"
            found.append(problem(check, text, f"keep one installation of {package}: {ranged.remedy}"))
        found.append(_judge_one(check, package, version, ranged))
    return found


def _judge_one(check: str, package: str, version: str, ranged: Range) -> Finding:
    if not _within(version, ranged.accepted):
        text = f"{package} {version}: the plugin is made for {package}{ranged.accepted}"
        return problem(check, text, ranged.remedy)
    if not _within(version, ranged.tried):
        text = f"{package} {version} is within {ranged.accepted}, and was not tried ({package}{ranged.tried} was)"
        return warning(check, text, f"run a few steps and look at sync/coverage_missing, or {ranged.remedy}")
    return ok(check, f"{package} {version}")


def _within(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(_public(version), prereleases=True)
    except InvalidVersion:  # a build of one's own
        return False


def _public(version: str) -> str:
    """A version without the label of a local build, as PEP 440 spells it: ``0.10.0.dev`` is ``0.10.0.dev0``."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).public
    except InvalidVersion:
        return version


def differences(nodes: Sequence[tuple[str, Versions]]) -> list[Finding]:
    """Packages of which nodes have different versions.

    Args:
        nodes: name and versions of each.
    """
    found = []
    for package in dict.fromkeys(name for _, versions in nodes for name in versions):
        there: dict[str, list[str]] = {}
        for node, versions in nodes:
            there.setdefault(versions.get(package) or "none", []).append(node)
        if len(there) == 1:
            continue
        text = f"{package} differs between nodes: " + "; ".join(f"{v} on {', '.join(at)}" for v, at in there.items())
        level = problem if package in SAME_EVERYWHERE else warning
        found.append(level(f"nodes/{package}", text, f"install the same {package} on every node, or use one image"))
    return found
