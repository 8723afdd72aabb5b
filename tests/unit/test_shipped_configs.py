# SPDX-License-Identifier: Apache-2.0
"""Composes every config and main of verl with and without the plugin, in processes that run this file."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import verl
from omegaconf import OmegaConf

import hydra_run

pytestmark = pytest.mark.extended  # two processes that compose some fifty configs each: a minute

PACKAGE = Path(verl.__file__).resolve().parent
OURS = "verl_sync_plugin.hooks.driver.SyncRolloutConfig"
WITHOUT_SYNC = "main_generation_server"
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.name=sglang"
Found = dict[str, Any]


class Main(NamedTuple):
    """A function of verl's that Hydra starts: its module, and where its config is."""

    module: str
    folder: Path
    name: str


def mains(package: Path = PACKAGE) -> Iterator[Main]:
    """Yields the functions that ``hydra.main`` decorates."""
    for file in sorted(package.rglob("*.py")):
        source = file.read_text()
        for call in ast.walk(ast.parse(source)) if "hydra.main(" in source else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hydra.main":
                given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
                yield Main(module, file.parent / given["config_path"], given["config_name"])


def cases() -> Iterator[tuple[str, Path, str, tuple[str, ...]]]:
    """Yields (program, folder, config, overrides): every main with its own config, and every config in its folder."""
    seen = set()
    for module, folder, name in mains():
        yield module.rpartition(".")[2], folder, name, ()
        for file in sorted({*folder.glob("*.yaml")} - seen):
            seen.add(file)
            yield "main_ppo", folder, file.stem, ()
            if "actor_rollout_ref" in file.read_text() or "ppo_trainer" in file.read_text():
                yield "main_ppo", folder, file.stem, (SGLANG,)
    yield WITHOUT_SYNC, hydra_run.CONFIG_DIR, "ppo_trainer", (SGLANG, f"{ROLLOUT}.quantization=fp8")
    engines = [(SGLANG, f"model_engine={engine}") for engine in ("megatron", "veomni", "torchtitan")]
    for overrides in ((f"{ROLLOUT}.name=vllm",), (SGLANG, "trainer.use_v1=False"), *engines):
        yield "main_ppo", hydra_run.CONFIG_DIR, "ppo_trainer", overrides


def collect(file: Path) -> None:
    configs: Found = {}
    for program, folder, name, overrides in cases():
        config = hydra_run.run(file.parent, *overrides, name=name, config_dir=folder, program=program)
        case = " ".join([program, str(folder.relative_to(PACKAGE)), name, *overrides])
        configs[case] = OmegaConf.to_container(config, resolve=False)
    modules = [importlib.import_module(main.module).__name__ for main in mains()]
    loaded = "verl_sync_plugin.plugin" in sys.modules
    file.write_text(json.dumps({"mains": modules, "configs": configs, "plugin": loaded}))


def test_every_main_is_there_and_every_config_holds_verls_values(tmp_path: Path) -> None:
    """But for our keys where the plugin moves the weights, and a mark that it is off where it does not."""
    running = {}
    for plugins in ("auto", "none"):
        environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
        command = [sys.executable, "-W", "ignore", "-m", "unit.test_shipped_configs", str(tmp_path / plugins)]
        log = (tmp_path / f"{plugins}.log").open("w")
        # Next to the package: verl's experimental configs name its folder relative to there
        running[plugins] = subprocess.Popen(command, cwd=PACKAGE.parent, env=environment, stderr=log, stdout=log)
    for plugins, process in running.items():
        assert process.wait(timeout=400) == 0, (tmp_path / f"{plugins}.log").read_text()[-4000:]
    ours, stock = (json.loads((tmp_path / plugins).read_text()) for plugins in running)
    assert ours["plugin"] and not stock["plugin"] and ours["mains"] == stock["mains"]
    known = ("main_ppo", "main_generation_server", "main_eval", "sft_trainer", "sft_trainer_ray")
    assert {f"verl.trainer.{main}" for main in known} < {*stock["mains"]}
    assert len([name for name in stock["mains"] if name.startswith("verl.experimental.")]) >= 2
    assert ours["configs"].keys() == stock["configs"].keys() and len(stock["configs"]) > 30
    synced = 0
    for case, verls in stock["configs"].items():
        synced += without_ours(case, ours["configs"][case], verls)
        assert ours["configs"][case] == verls, case
    assert synced >= 6


def without_ours(case: str, mine: Found, verls: Found) -> bool:
    """Takes what may differ out of both configs; True where the plugin moves the weights."""
    rollout = (mine.get("actor_rollout_ref") or {}).get("rollout") or {}
    if rollout.get("_target_") != OURS:
        if "_generated_" not in case:  # these have none of our keys, so no driver's check: the trainer settles them
            mark = rollout.pop("custom", None)
            assert mark == ({"sync": {"enabled": False}} if rollout.get("name") == "sglang" else None), case
        return False
    strategy = mine["actor_rollout_ref"]["actor"]["strategy"]
    assert rollout["name"] == "sglang" and strategy in ("fsdp", "fsdp2", "megatron")
    assert case.split()[0] != WITHOUT_SYNC
    assert "${" not in json.dumps([rollout["custom"], rollout["update_weights_bucket_megabytes"]])
    size = 512 if rollout["checkpoint_engine"]["backend"] in ("naive", "sync_plugin") else 2048  # verl's default
    assert rollout["checkpoint_engine"]["update_weights_bucket_megabytes"] == size and rollout["multi_stage_wake_up"]
    for side in (rollout, verls["actor_rollout_ref"]["rollout"]):
        for key in ("custom", "update_weights_bucket_megabytes", "multi_stage_wake_up", "_target_"):
            side.pop(key, None)
        del side["checkpoint_engine"]["update_weights_bucket_megabytes"]
    return True


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
