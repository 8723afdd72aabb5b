# SPDX-License-Identifier: Apache-2.0
"""Every config and main of the installed verl composes with the plugin as it does without, and to verl's own values."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verl

import unmeasured

pytestmark = pytest.mark.extended  # two processes that compose some fifty configs each: a minute

PACKAGE = Path(verl.__file__).resolve().parent
OURS = "verl_sync_plugin.hooks.driver.SyncRolloutConfig"
SERVED = ("fsdp", "fsdp2", "megatron")
WITHOUT_SYNC = ("main_generation_server",)
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """Returns what a process with the plugin finds, and one without; both run at once."""
    running = []
    for plugins in ("auto", "none"):
        folder = tmp_path_factory.mktemp(plugins)
        environment = {**unmeasured.environment(), "VERL_USE_EXTERNAL_PLUGINS": plugins}
        command = [sys.executable, "-W", "ignore", "-m", "shipped_configs", str(folder)]
        # Next to the package: verl's experimental configs name its folder relative to there
        log = (folder / "log").open("w")
        running.append((folder, subprocess.Popen(command, cwd=PACKAGE.parent, env=environment, stderr=log, stdout=log)))
    results = []
    for folder, process in running:
        assert process.wait(timeout=400) == 0, (folder / "log").read_text()[-4000:]
        results.append(json.loads((folder / "found.json").read_text()))
    ours, stock = results
    assert ours["plugin"] and not stock["plugin"]
    assert ours["configs"].keys() == stock["configs"].keys()
    return ours, stock


def test_all_are_there_and_end_alike(found: tuple[Found, Found]) -> None:
    ours, stock = found
    for main in ("main_ppo", "main_generation_server", "main_eval", "sft_trainer", "sft_trainer_ray"):
        assert f"verl.trainer.{main}" in stock["mains"]
    assert len([name for name in stock["mains"] if name.startswith("verl.experimental.")]) >= 2
    assert ours["mains"] == stock["mains"] == dict.fromkeys(stock["mains"], "")
    assert len(stock["configs"]) > 30
    for case, result in stock["configs"].items():
        assert "error" not in result and "error" not in ours["configs"][case], case


def test_every_config_holds_verls_values(found: tuple[Found, Found]) -> None:
    """But for our keys where the plugin moves the weights, and a mark that it is off where it does not."""
    ours, stock = found
    synced = 0
    for case, result in stock["configs"].items():
        mine, verls = copy.deepcopy(ours["configs"][case]["config"]), copy.deepcopy(result["config"])
        synced += without_ours(case, mine, verls)
        assert mine == verls, case
    assert synced >= 6


def without_ours(case: str, mine: dict[str, Any], verls: dict[str, Any]) -> bool:
    """Takes what may differ out of both configs; True where the plugin moves the weights."""
    rollout = (mine.get("actor_rollout_ref") or {}).get("rollout") or {}
    stock = (verls.get("actor_rollout_ref") or {}).get("rollout") or {}
    if rollout.get("_target_") != OURS:
        if "_generated_" not in case:  # these have none of our keys, so no driver's check: the trainer settles them
            mark = rollout.pop("custom", None)
            assert mark == ({"sync": {"enabled": False}} if rollout.get("name") == "sglang" else None), case
        return False
    assert rollout["name"] == "sglang" and mine["actor_rollout_ref"]["actor"]["strategy"] in SERVED, case
    assert case.split()[0] not in WITHOUT_SYNC
    assert "${" not in json.dumps([rollout["custom"], rollout["update_weights_bucket_megabytes"]])
    assert rollout["checkpoint_engine"]["update_weights_bucket_megabytes"] == 512 and rollout["multi_stage_wake_up"]
    for side in (rollout, stock):
        for key in ("custom", "update_weights_bucket_megabytes", "multi_stage_wake_up", "_target_"):
            side.pop(key, None)
        del side["checkpoint_engine"]["update_weights_bucket_megabytes"]
    return True
