# SPDX-License-Identifier: Apache-2.0
"""The form of a result file, checked before it is written, by the table and by the tests."""

from __future__ import annotations

import re
from typing import Any

VARIANTS = ("stock", "plugin")
PEERS = ("checkpoint-engine", "awex")  # of the transfer alone
STAGES = ("sleep", "resume_weights", "update_weights", "resume_kv", "phase")
TOP: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "machine": dict,
    "versions": dict,
    "commit": str,
    "date": str,
    "command": str,
    "runs": list,
}
RUN: dict[str, type | tuple[type, ...]] = {
    "variant": str,
    "settings": dict,
    "stages": dict,
    "samples": dict,
    "bytes": (int, type(None)),
    "peak_device_bytes": (int, type(None)),
    "peak_host_bytes": int,
}
NUMBER = (int, float)


def _keys(value: Any, form: dict[str, type | tuple[type, ...]], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: not an object"]
    problems = [f"{where}: missing {key!r}" for key in form.keys() - value.keys()]
    problems += [f"{where}: unknown {key!r}" for key in value.keys() - form.keys()]
    for key in form.keys() & value.keys():
        if not isinstance(value[key], form[key]) or isinstance(value[key], bool):
            problems.append(f"{where}.{key}: {value[key]!r} has the wrong type")
    return sorted(problems)


def _stages(stages: dict[str, Any], where: str) -> list[str]:
    problems = [] if set(stages) == set(STAGES) else [f"{where}: stages are {sorted(stages)}, not {sorted(STAGES)}"]
    for name, seconds in stages.items():
        if isinstance(seconds, bool) or not isinstance(seconds, NUMBER) or seconds < 0:
            problems.append(f"{where}.{name}: {seconds!r} is not a number of seconds")
    return problems


def _run(run: Any, where: str) -> list[str]:
    problems = _keys(run, RUN, where)
    if problems:
        return problems
    if run["variant"] not in (*VARIANTS, *PEERS):
        problems.append(f"{where}.variant: {run['variant']!r} is not one of {(*VARIANTS, *PEERS)}")
    problems += _stages(run["stages"], f"{where}.stages")
    if not problems and run["stages"]["phase"] <= 0:
        problems.append(f"{where}.stages.phase: not above zero")
    if not isinstance(run["samples"].get("syncs"), list) or not run["samples"]["syncs"]:
        problems.append(f"{where}.samples.syncs: missing or empty")
    return problems


def problems(result: Any) -> list[str]:
    """What is wrong with a result; empty when it has the form."""
    searched = isinstance(result, dict) and isinstance(result.get("attempts"), list)
    found = _keys(result, {**TOP, "attempts": list} if searched else TOP, "result")
    if found:
        return found
    if "gpu" not in result["machine"]:
        found.append("machine: missing 'gpu'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
        found.append(f"date: {result['date']!r} is not YYYY-MM-DD")
    # of a search every try is an attempt, and a run only what survived
    if not (result["attempts"] if searched else result["runs"]):
        found.append("runs: empty")
    for index, run in enumerate(result["runs"]):
        found += _run(run, f"runs[{index}]")
    return found
