# SPDX-License-Identifier: Apache-2.0
"""The transfer benchmark, its profile and the soak on the CPU: both variants against one real SGLang server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import unmeasured
from benchmarks import schema
from benchmarks.report import table, transfer_table
from benchmarks.soak import growth
from benchmarks.soak.trainers import KINDS, SEPARATE
from benchmarks.transfer import models as transfer_models

ROOT = Path(__file__).resolve().parents[2]
# what the three commands do, but for the start of a server each
SCRIPT = """
import os, signal, sys
from pathlib import Path
from benchmarks.soak import measure as soak
from benchmarks.transfer import measure as transfer, rig

common = ["--model", "tiny-moe", "--device", "cpu"]
measured = transfer.arguments([*common, "--case", "smoke", "--buckets", "1", "--repeat", "1",
    "--variants", "stock,plugin,plugin-staged", "--profile", "profiles", "--out", "result.json"])
soaked = soak.arguments([*common, "--bucket-mb", "1", "--syncs", "30", "--every", "3", "--out", "soak.json"])
with rig.rig("tiny-moe", "cpu", "bfloat16", Path("work").resolve()) as bench:
    result = transfer.compare(measured, bench)
    transfer.profile(measured, bench, result)
    if soak.measure(soaked, bench):
        sys.exit(1)
    Path("schedulers").write_text(" ".join(str(process.pid) for process in bench.server.schedulers()))
    os.kill(os.getpid(), signal.SIGTERM)  # as a visit's time limit does
    signal.pause()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the three have written."""
    folder = tmp_path_factory.mktemp("transfer")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # and nothing else of the checkout
    env = {**unmeasured.environment(), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.extended
def test_stock_and_plugin_on_one_server(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert not schema.problems(result)
    stock, *ours = result["runs"]
    tensors = len(transfer_models.shapes("tiny-moe"))
    for plugin, packed in zip(ours, (False, True), strict=True):
        assert stock["samples"]["tokens"] == plugin["samples"]["tokens"]
        (report,) = (sample["report"] for sample in plugin["samples"]["syncs"])
        assert report["replayed_tensors"] == report["tensors"] == tensors == plugin["settings"]["tensors"]
        assert report["replayed_bytes"] == plugin["bytes"] == stock["bytes"]
        assert {"connect", "wait_engine", "engine_load", "commit"} <= report["stages"].keys()
        assert (report["direct_bytes"] == 0) is ({"pack", "gather"} <= report["stages"].keys()) is packed
    (row,) = (line for line in table.render([result]).splitlines() if line.startswith("| smoke"))
    assert row.split(" | ")[1:3] == ["1 MiB", transfer_table.milliseconds(stock["stages"]["phase"])]


@pytest.mark.slow
@pytest.mark.extended
def test_profile_of_one_sync_shows_both_processes(folder: Path) -> None:
    stock, direct, plugin = json.loads((folder / "profiles" / "smoke-profile.json").read_text())["profiles"]
    assert (stock["variant"], direct["variant"], plugin["variant"]) == ("stock", "plugin", "plugin-staged")
    for profile in (stock, direct, plugin):
        assert profile["device_busy_share"] is None, "there is none"
        assert profile["seconds"] > 0 and profile["unprofiled_seconds"] > 0
        copies: dict[str, Any] = {
            name: [row for row in process["host"] if row["name"] == "aten::copy_"]
            for name, process in profile["processes"].items()
        }
        assert copies.keys() == {"trainer", "engine 0"}
        if profile is stock:
            # of one sync, cut out of the engine's trace by the trainer's clock
            assert all(rows and rows[0]["count"] >= len(transfer_models.shapes("tiny-moe")) for rows in copies.values())
    assert "pack" not in {row["name"] for row in direct["stages"]}
    stages = {row["name"]: row for row in plugin["stages"]}
    assert {"connect", "pack", "gather", "wait_engine", "commit"} <= stages.keys()
    assert 0 < stages["pack"]["seconds"] < stages["update_weights"]["seconds"] < plugin["seconds"]
    for name in ("smoke-plugin-1mb-trainer", "smoke-plugin-1mb-engine0", "smoke-stock-1mb-engine0"):
        assert (folder / "profiles" / f"{name}.trace.json.gz").stat().st_size > 1000
    assert "## plugin, 1 MiB" in (folder / "profiles" / "smoke-profile.md").read_text()


@pytest.mark.slow
@pytest.mark.extended
def test_soak_samples_both_processes(folder: Path) -> None:
    result = json.loads((folder / "soak.json").read_text())
    assert not schema.problems(result)
    samples = result["runs"][0]["samples"]
    assert [sample["sync"] for sample in samples["syncs"]] == [1, *range(3, 31, 3)]
    for part in ("trainer", "schedulers"):
        assert all(sample[part]["rss_bytes"] > 1e8 and sample[part]["fds"] > 3 for sample in samples["syncs"])
    expected = {name for name in growth.ALLOWED if not name.startswith(("device", "trainer.torch", "rollout"))}
    assert samples["growth"].keys() == expected, "and no seconds: other work on this machine decides those"
    first, others = samples["tokens"]["first"], samples["tokens"]["others"]
    assert len(first) == len(others) == 2 and first[0] == first[1] != others[0] == others[1]
    assert "30 syncs in a row" in table.render([result]) and "nothing grows" in table.render([result])


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("trainer", [kind for kind in KINDS if kind != "plain"])
def test_soak_of_a_training_engine(trainer: str, tmp_path: Path) -> None:
    """Also the adapter that SGLang serves, and the rollout rank of a separate rollout."""
    words = f"--model tiny --trainer {trainer} --bucket-mb 1 --syncs 24 --every 3"
    result = harness("soak", words, tmp_path)
    grown = {name.partition(".")[0] for name in result["runs"][0]["samples"]["growth"]}
    assert grown == {"trainer", "schedulers", *(["rollout"] if trainer.startswith(SEPARATE) else [])}


@pytest.mark.slow
@pytest.mark.extended
def test_transfer_from_megatron_to_a_rollout_apart(tmp_path: Path) -> None:
    result = harness("apart", "--case apart --model tiny --bucket-mb 1 --variants plugin --repeat 2", tmp_path)
    (run,) = result["runs"]
    last = run["samples"]["syncs"][-1]["report"]
    assert last["nbytes"] == run["bytes"] > 0 and last["manager"] == "SeparateTrainer"
    assert any(line.startswith("| apart | 1 MiB |") for line in table.render([result]).splitlines())


@pytest.mark.slow
@pytest.mark.extended
def test_pauses_with_requests_in_flight(tmp_path: Path) -> None:
    words = "--case pauses --model tiny --requests 3 --tokens 200 --ahead 20 --repeat 1"
    runs = harness("pauses", words, tmp_path)["runs"]
    assert [run["settings"]["way"] for run in runs] == ["stock", "abort", "retract", "in_place"]
    paused = [run["stages"]["phase"] for run in runs]
    assert paused[0] >= 1 > max(paused[1:]), "SGLang's own pause looks once a second"


def harness(name: str, words: str, folder: Path) -> dict[str, Any]:
    """The result of a harness that has a training engine of verl's."""
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    words += " --device cpu --work w --out result.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words.split()],
        env={**unmeasured.environment(), "VERL_CPU_MCORE": "1", "PYTHONPATH": str(folder)},
        cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert not schema.problems(result)
    return result


@pytest.mark.slow
@pytest.mark.extended
def test_time_limit_leaves_no_engine_behind(folder: Path) -> None:
    pids = (folder / "schedulers").read_text().split()
    assert pids and not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_shapes_of_the_models() -> None:
    counts = {}
    for kind in ("dense-7b", "moe-10k", "moe-19k"):
        shapes = transfer_models.shapes(kind)
        assert len(dict(shapes)) == len(shapes)
        numel = 0
        for _, shape in shapes:
            product = 1
            for size in shape:
                product *= size
            numel += product
        counts[kind] = (len(shapes), round(2 * numel / 1e9, 2))
    assert counts == {"dense-7b": (339, 15.23), "moe-10k": (9651, 32.06), "moe-19k": (18867, 32.07)}
