# SPDX-License-Identifier: Apache-2.0
"""Everything that the doctor looks at on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_sync_plugin.cli.doctor import loading, machine, versions
from verl_sync_plugin.cli.doctor.findings import Finding, of_dicts, problem, warning, worst


def check_node(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Looks at this machine and this environment; starts a fresh process that imports verl.

    Args:
        overrides: of a run, to be composed and linted too.

    Returns:
        Plain values: ``versions`` by package, ``machine`` (``machine.facts``), ``run`` (``overrides.lint``, ``None``
        where there was nothing to lint or the plugin is not loaded) and ``findings`` as dictionaries.
    """
    installed, read = versions.installed(), machine.facts()
    entry = loading.check_entry_points()
    result = loading.probe(overrides)
    imported = {"verl": result["verl"]["version"]} if result.get("verl", {}).get("version") else {}
    found = versions.judge(installed, imported) + entry
    gpus = len(read["gpu"]["devices"])
    found += loading.check_hooks(result, worst(entry) != "problem", gpus)
    found += machine.check(read) + _check_memory_saver(installed, gpus)
    run = result.get("run")
    if overrides:
        found += _check_run(run, gpus)
    return {"versions": installed, "machine": read, "run": run, "findings": [each.as_dict() for each in found]}


def _check_memory_saver(installed: versions.Versions, gpus: int) -> list[Finding]:
    if not gpus or installed["torch-memory-saver"] is not None:
        return []
    text = "torch-memory-saver is not installed: the engine cannot give its memory to the trainer"
    return [problem("version/torch-memory-saver", text, "pip install torch-memory-saver")]


def _check_run(run: dict[str, Any] | None, gpus: int) -> list[Finding]:
    if run is None:
        text = "the overrides were not looked at, since verl does not load the plugin here"
        return [problem("overrides", text, "mend what keeps the plugin from being loaded first")]
    found, wanted = of_dicts(run["findings"]), run.get("gpus_per_node")
    if gpus and isinstance(wanted, int) and wanted > gpus:
        text = f"trainer.n_gpus_per_node={wanted}, and {gpus} are visible here"
        found.append(warning("gpus-per-node", text, f"trainer.n_gpus_per_node={gpus}, or look at CUDA_VISIBLE_DEVICES"))
    return found
