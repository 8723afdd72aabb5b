# SPDX-License-Identifier: Apache-2.0
"""Every benchmark on the CPU, as its README has it typed: in a checkout, with nothing else importable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import common, report, soak, transfer
from megatron_cpu.engines import MEGATRON_BRIDGE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.extended]


def run(name: str, words: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The runs of a benchmark's result, and its tables."""
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    words += " --device cpu --work w --out result.json"
    bridge = str(MEGATRON_BRIDGE) if "megatron" in words else None
    path = os.pathsep.join(filter(None, (bridge, str(folder), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words.split()],
        env={**os.environ, "VERL_CPU_MCORE": "1", "PYTHONPATH": path},
        cwd=folder, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    assert not left, "a benchmark leaves no process behind"
    result = json.loads((folder / "result.json").read_text())
    assert not common.problems_of(result)
    return result["runs"], report.render([result])


def test_every_sync_of_a_training_run_is_measured(tmp_path: Path) -> None:
    words = "--case cpu-smoke --model-size tiny --steps 2 --variants plugin"
    (found,), shown = run("phase", words, tmp_path)
    assert found["variant"] == "plugin" and found["settings"]["exit_status"] == 0 and found["stages"]["phase"] > 0
    first, *later = (found["samples"]["first_sync"], *found["samples"]["syncs"])
    assert len(later) == 2 and len(found["samples"]["verl_update_weights_s"]) == 2
    for sync in later:
        assert sync["bytes"] == first["bytes"] == found["bytes"] > 0
        assert sync["report"]["replayed_tensors"] == sync["report"]["tensors"] > 0
    assert "| cpu-smoke | plugin |" in shown


def test_stock_and_plugin_on_one_server(tmp_path: Path) -> None:
    words = "--case smoke --model tiny-moe --buckets 1 --repeat 1 --variants stock,plugin,plugin-staged"
    (stock, *ours), shown = run("transfer", words, tmp_path)
    tensors = len(transfer.shapes("tiny-moe"))
    for plugin, packed in zip(ours, (False, True), strict=True):
        assert stock["samples"]["tokens"] == plugin["samples"]["tokens"]
        (sample,) = (sample["report"] for sample in plugin["samples"]["syncs"])
        assert sample["replayed_tensors"] == sample["tensors"] == tensors == plugin["settings"]["tensors"]
        assert plugin["bytes"] == stock["bytes"]
        assert sample["delivery"] == ("staged" if packed else "in place")
    (row,) = (line for line in shown.splitlines() if line.startswith("| smoke"))
    assert row.split(" | ")[1:3] == ["1 MiB", report.milliseconds(stock["stages"]["phase"])]
    assert "staged in every sync" in shown


@pytest.mark.parametrize("trainer", soak.KINDS)
def test_soak(trainer: str, tmp_path: Path) -> None:
    """Also the adapter that SGLang serves, and the rollout rank of a separate rollout."""
    words = f"--model tiny --trainer {trainer} --bucket-mb 1 --syncs 24 --every 3"
    (found,), shown = run("soak", words, tmp_path)
    samples = found["samples"]
    assert [sample["sync"] for sample in samples["syncs"]] == [1, *range(3, 25, 3)]
    parts = {"trainer", "schedulers", *(["rollout"] if trainer.startswith(soak.SEPARATE) else [])}
    assert {name.partition(".")[0] for name in samples["growth"]} == parts, "and no seconds: neighbours decide those"
    first, others = samples["tokens"]["first"], samples["tokens"]["others"]
    assert first[0] == first[1] != others[0] == others[1]
    assert "24 syncs in a row" in shown and "nothing grows" in shown


def test_pauses_with_requests_in_flight(tmp_path: Path) -> None:
    words = "--case pauses --model tiny --requests 3 --tokens 200 --ahead 20 --repeat 1"
    runs, shown = run("pauses", words, tmp_path)
    assert [found["settings"]["way"] for found in runs] == ["stock", "abort", "retract", "in_place"]
    paused = [found["stages"]["phase"] for found in runs]
    assert paused[0] >= 1 > max(paused[1:]), "SGLang's own pause looks once a second"
    assert "| `pauses` | ours | `in_place` |" in shown
