# SPDX-License-Identifier: Apache-2.0
"""Whether verl loads the plugin here, and which of its hooks are then active."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning

GROUP = "verl.plugins"
POINT = "verl_sync_plugin"  # the name of our entry point, by which a whitelist lets it through
VALUE = "verl_sync_plugin.plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
MODULES = "VERL_USE_EXTERNAL_MODULES"
PROBE = "verl_sync_plugin.cli.doctor.hooks_probe"
PROBE_SECONDS = 600
REINSTALL = "install the plugin anew: pip install --force-reinstall --no-deps verl-sync-plugin"
# The hooks that import the rollout engine, which cannot be imported everywhere
OF_THE_ENGINE = ("rollout-adapter", "rollout-replica", "engine-loader")


def probe(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What ``hooks_probe`` finds in a fresh process with this environment; ``crashed`` where it did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        command = [sys.executable, "-m", PROBE, str(path), *overrides]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"crashed": f"importing verl took more than {PROBE_SECONDS} s"}
        if path.is_file():
            result: dict[str, Any] = json.loads(path.read_text())
            return result
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        return {"crashed": f"exit status {ended.returncode}: {said[-1] if said else 'nothing on stderr'}"}


def check_entry_points() -> list[Finding]:
    """How verl is to find the plugin: the entry point, verl's variables, and who else is there."""
    points = list(importlib.metadata.entry_points(group=GROUP))
    ours = [point for point in points if point.value == VALUE]
    found = []
    by_module = VALUE in os.environ.get(MODULES, "").split(",")
    if ours:
        found.append(ok("entry-point", f"{ours[0].name} = {VALUE} in {GROUP}"))
    elif by_module:
        text = f"{MODULES} loads the plugin; it has no entry point in {GROUP}"
        found.append(warning("entry-point", text, f"pip install the plugin, or set {MODULES} on every node, too"))
    else:
        text = f"no entry point in the group {GROUP}: the plugin is importable, but was not installed with pip"
        found.append(problem("entry-point", text, "pip install . in its checkout, instead of PYTHONPATH"))
    if (refused := _refused_by_policy(ours[0].name if ours else POINT)) is not None and not by_module:
        found.append(refused)
    for point in points:
        if point.value != VALUE:
            owner = f" (of {point.dist.name} {point.dist.version})" if point.dist is not None else ""
            found.append(ok("other-plugins", f"verl also loads {point.value}{owner}"))
    return found


def _refused_by_policy(name: str) -> Finding | None:
    """verl's whitelist, read as verl reads it."""
    value = os.environ.get(POLICY, "auto")
    policy = value.strip().lower()
    if policy == "auto":
        return None
    if policy == "none":
        return problem("whitelist", f"{POLICY}={value}: verl loads no plugin", f"unset {POLICY}")
    allowed = [word.strip() for word in policy.split(",") if word.strip()]
    if name in allowed:
        return None
    text = f"{POLICY}={value}: verl loads only these plugins, and {name} is not among them"
    return problem("whitelist", text, f"{POLICY}={','.join([*allowed, name])}, or unset it")


def check_hooks(result: Mapping[str, Any], expected: bool, gpus: int) -> list[Finding]:
    """One finding per hook, and one for what kept them all from being loaded.

    Args:
        result: of ``probe``.
        expected: nothing found before explains why the plugin would not be loaded.
        gpus: that are visible here.
    """
    if "crashed" in result:
        text = f"a fresh process that imports verl ended: {result['crashed']}"
        return [problem("import", text, "run python -c 'import verl' and look at its traceback")]
    if error := result["verl"].get("error"):
        return [problem("import", f"verl cannot be imported: {error}", "mend that first: python -c 'import verl'")]
    if error := result["plugin"].get("error"):
        return [_stopped(error)]
    if not result["plugin"]["loaded"]:
        text = "importing verl does not load the plugin, so stock verl moves the weights"
        return [problem("import", text, f"pip install the plugin, and unset {POLICY}")] if expected else []
    found = [ok("import", f"importing verl loads {result['plugin']['file']}")]
    return found + [_judge_hook(name, hook, gpus) for name, hook in result["hooks"].items()]


def _stopped(error: str) -> Finding:
    """The plugin ended the process that imported verl, as it would end a run."""
    _, _, reason = error.partition("cannot be loaded: ")
    if "already taken by" in reason:
        remedy = "uninstall one of the two plugins, or leave the other one out: " + f"{POLICY}={POINT}"
        return problem("import", f"another plugin was there first: {reason}", remedy)
    if "does not offer" in reason:
        return problem("import", reason, "install the verl that the plugin is made for: pip install verl==0.9.1")
    return problem("import", f"the plugin cannot be loaded: {reason}", REINSTALL)


def _judge_hook(name: str, hook: Mapping[str, Any], gpus: int) -> Finding:
    check = f"hook/{name}"
    if hook["active"]:
        return ok(check, f"active: {hook['text']}")
    if hook["holder"]:
        other = hook["holder"].partition(" (of ")[2].rstrip(")")
        remedy = f"pip uninstall {other}" if other else "uninstall the other plugin"
        return problem(check, f"another plugin took its place: {hook['text']}", f"{remedy}, or {POLICY}={POINT}")
    text = f"not active: {hook['text']}"
    missing = hook.get("missing", "")
    if missing and not missing.startswith("verl_sync_plugin"):
        remedy = f"install what {missing.partition('.')[0]!r} belongs to"
    elif "already registed" in hook["text"] or "already taken" in hook["text"]:
        return problem(check, text, f"uninstall one of the two plugins, or {POLICY}={POINT}")
    else:
        remedy = REINSTALL if "verl_sync_plugin" in hook.get("file", "") else f"mend {hook.get('file') or 'it'} first"
    if name in OF_THE_ENGINE and not gpus and os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return warning(check, f"{text}; no GPU is visible here", "run the doctor on a node with GPUs")
    return problem(check, text, remedy)
