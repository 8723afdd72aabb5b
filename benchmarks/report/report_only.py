# SPDX-License-Identifier: Apache-2.0
"""Makes a result of a plugin run of which the probe missed the worker's call, from the plugin's own reports.

Such a result is of the harness ``report``: its seconds are by the plugin's clock, which stock verl has not, so it
stands in no table beside stock. It takes the arguments of ``benchmarks.phase``, the folder with that run's log and
probe file, and ``--like``: a result of the same visit, for machine, versions, commit and day.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import schema
from benchmarks.command import command_line
from benchmarks.phase import options, summary
from benchmarks.schema import STAGES

HARNESS = "report"


def reports_of(probe_file: Path) -> list[dict[str, Any]]:
    """The reports of a run, one per sync."""
    records = [json.loads(line) for line in probe_file.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record.get("event") == "sync_report"]


def seconds_of(report: dict[str, Any]) -> dict[str, float]:
    """The stages of one report; ``phase`` is the sum of all that a training step waits for."""
    from verl_sync_plugin.report import PHASE_STAGES

    stages = report["stages"]
    found = {name: float(stages.get(name, 0.0)) for name in STAGES if name != "phase"}
    return {**found, "phase": sum(float(stages.get(name, 0.0)) for name in PHASE_STAGES)}


def run_of(settings: dict[str, Any], probe_file: Path, log: Path) -> dict[str, Any]:
    """One entry of ``runs``: medians without the first sync, unless there is no other.

    ``peak_host_bytes`` is what a sync added to the resident set.
    """
    first, *measured = reports_of(probe_file)
    if not measured:
        settings, measured = {**settings, "first_sync_only": True}, [first]
    seconds = [seconds_of(report) for report in measured]
    used = [max(report["device_used_bytes"].values(), default=0) for report in measured]
    return {
        "variant": "plugin",
        "settings": {**settings, "harness": HARNESS},
        "stages": {name: round(statistics.median(each[name] for each in seconds), 6) for name in STAGES},
        "samples": {
            "first_sync": first,
            "syncs": measured,
            "verl_update_weights_s": summary.verl_timings(log),
            "rollouts": summary.rollouts(settings, log),
        },
        "bytes": max(report["nbytes"] for report in measured),
        "peak_device_bytes": max(used),
        "peak_host_bytes": max(report["peak_host_bytes"] for report in measured),
    }


def main(argv: list[str]) -> int:
    """Writes the result; returns the exit status."""
    like = json.loads(Path(argv[argv.index("--like") + 1]).read_text(encoding="utf-8"))
    place = argv.index("--like")
    args = options.arguments(argv[:place] + argv[place + 2 :])
    case = options.case_of(args)
    stem = f"{case.name}-plugin-0"
    settings = {**dataclasses.asdict(case), "repeat": 0}
    run = run_of(settings, args.work / f"{stem}.jsonl", args.work / f"{stem}.log")
    kept = {name: like[name] for name in ("versions", "commit", "date")}
    machine = {**like["machine"], "gpus": case.gpus}
    result = {"case": case.name, "machine": machine, **kept, "command": command_line("phase", args), "runs": [run]}
    assert not schema.problems(result), schema.problems(result)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
