# SPDX-License-Identifier: Apache-2.0
"""What the doctor prints: a page for people, or JSON (docs/doctor.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_sync_plugin import __version__
from verl_sync_plugin.cli.doctor.findings import OK, PROBLEM, WARNING, Finding, of_dicts, worst

SCHEMA = 1  # of the JSON; raised when a key changes its meaning or goes
MARKS = {OK: "ok", WARNING: "WARNING", PROBLEM: "PROBLEM"}


def result(nodes: Sequence[Mapping[str, Any]], between: Sequence[Finding]) -> dict[str, Any]:
    """The doctor's whole result as plain values.

    Args:
        nodes: of ``check_node``, each with ``node`` and ``address``; the first is this machine.
        between: differences between nodes, and what is of none of them.
    """
    every = [*between, *(each for node in nodes for each in of_dicts(node["findings"]))]
    level = worst(every)
    return {
        "schema": SCHEMA,
        "plugin": __version__,
        "ready": level != PROBLEM,
        "level": level,
        "problems": sum(each.level == PROBLEM for each in every),
        "warnings": sum(each.level == WARNING for each in every),
        "findings": [each.as_dict() for each in between],
        "nodes": list(nodes),
    }


def as_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False)


def as_text(found: Mapping[str, Any]) -> str:
    lines = [f"verl-sync-plugin {found['plugin']}"]
    for node in found["nodes"]:
        lines += ["", f"{node['node']}" + (f", {node['address']}" if node["address"] else "")]
        known = [f"{package} {version}" for package, version in node["versions"].items() if version]
        lines += [f"  {', '.join(known)}"] if known else []
        lines += _lines(of_dicts(node["findings"]), brief=len(found["nodes"]) > 1)
    if found["findings"]:
        lines += ["", "all nodes", *_lines(of_dicts(found["findings"]))]
    return "\n".join([*lines, "", _verdict(found)])


def _lines(findings: Sequence[Finding], brief: bool = False) -> list[str]:
    """Two lines of each finding with its remedy; when ``brief`` only the number of those that are ok."""
    lines = [f"  {MARKS[OK]:8} {sum(each.level == OK for each in findings)} checks"] if brief else []
    for each in findings:
        if brief and each.level == OK:
            continue
        lines.append(f"  {MARKS[each.level]:8} {each.check}: {each.text}")
        if each.remedy:
            lines.append(f"  {'':8}   → {each.remedy}")
    return lines


def _verdict(found: Mapping[str, Any]) -> str:
    if not found["ready"]:
        return f"not ready: {_count(found['problems'], 'problem')}"
    return "ready" + (f", with {_count(found['warnings'], 'warning')}" if found["warnings"] else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
