# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the phase as its README has it typed, on the CPU: in a checkout, with nothing else importable.

Of the plugin alone, to save a training run: that a result is of the variant it says, and stock verl's command line, are
``unit/test_benchmarks*``; stock verl's sync is measured in ``test_transfer_benchmark``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import unmeasured
from benchmarks import schema
from benchmarks.phase import parse

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "-m benchmarks.phase --case cpu-smoke --model-size tiny --device cpu --steps 2 --variants plugin"


@pytest.mark.slow
@pytest.mark.extended
def test_every_sync_of_a_training_run_is_measured(tmp_path: Path) -> None:
    env = {name: value for name, value in unmeasured.environment().items() if name != "PYTHONPATH"}
    command = [sys.executable, *COMMAND.split(), "--work", str(tmp_path), "--out", str(tmp_path / "smoke.json")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "smoke.json").read_text())
    assert not schema.problems(result)
    (run,) = result["runs"]
    assert run["variant"] == "plugin" and run["settings"]["exit_status"] == 0
    assert set(run["stages"]) == set(parse.STAGES) and run["stages"]["phase"] > 0
    first, *later = (run["samples"]["first_sync"], *run["samples"]["syncs"])
    assert len(later) == 2 and len(run["samples"]["verl_update_weights_s"]) == 2
    for sync in later:
        report = sync["report"]
        assert sync["bytes"] == first["bytes"] == run["bytes"] > 0
        assert report["replayed_tensors"] == report["tensors"] == first["report"]["replayed_tensors"] > 0
