# SPDX-License-Identifier: Apache-2.0
"""Every config and main of the installed verl composes with the plugin as it does without, and to verl's own values.

Run as a module with a folder, in the folder that holds the package ``verl``, since verl's experimental configs name
theirs relative to it, this file imports every main, composes every config, and leaves ``found.json`` in the folder.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import verl
from omegaconf import OmegaConf

import hydra_run
import unmeasured

pytestmark = pytest.mark.extended  # two processes that compose some fifty configs each: a minute

PACKAGE = Path(verl.__file__).resolve().parent
OURS = "verl_sync_plugin.hooks.driver.SyncRolloutConfig"
SERVED = ("fsdp", "fsdp2", "megatron")
WITHOUT_SYNC = ("main_generation_server",)
Found = dict[str, dict[str, Any]]
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.name=sglang"
ENGINES = ("megatron", "veomni", "torchtitan")


@dataclass(frozen=True)
class Main:
    """A function of verl's that Hydra starts: its module, and where its config is."""

    module: str
    folder: Path
    name: str


def mains(package: Path) -> list[Main]:
    """The functions in ``package`` that are decorated with ``hydra.main``."""
    found = []
    for file in sorted(package.rglob("*.py")):
        source = file.read_text()
        if "hydra.main(" not in source:
            continue
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hydra.main":
                given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
                found.append(Main(module, file.parent / given["config_path"], given["config_name"]))
    return found


def cases(package: Path) -> Iterator[tuple[str, Path, str, tuple[str, ...]]]:
    """Yields (program, folder, config, overrides): every main with its own config, and every config in its folder."""
    seen = set()
    for main in mains(package):
        program = main.module.rpartition(".")[2]
        yield program, main.folder, main.name, ()
        for file in sorted(main.folder.glob("*.yaml")):
            if (file in seen) or seen.add(file):
                continue
            yield "main_ppo", main.folder, file.stem, ()
            if "actor_rollout_ref" in file.read_text() or "ppo_trainer" in file.read_text():
                yield "main_ppo", main.folder, file.stem, (SGLANG,)
    folder = package / "trainer" / "config"
    yield "main_ppo", folder, "ppo_trainer", (f"{ROLLOUT}.name=vllm",)
    yield "main_ppo", folder, "ppo_trainer", (SGLANG, "trainer.use_v1=False")
    yield "main_generation_server", folder, "ppo_trainer", (SGLANG, f"{ROLLOUT}.quantization=fp8")
    for engine in ENGINES:
        yield "main_ppo", folder, "ppo_trainer", (SGLANG, f"model_engine={engine}")


def composed(folder: Path, program: str, config_dir: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    try:
        config = hydra_run.run(folder, *overrides, name=name, config_dir=config_dir, program=program)
        return {"config": OmegaConf.to_container(config, resolve=False)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}


def imported(module: str) -> str:
    """The error of an import, if any."""
    try:
        importlib.import_module(module)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def collect(folder: Path) -> None:
    found = {
        "mains": {main.module: imported(main.module) for main in mains(PACKAGE)},
        "configs": {
            " ".join([program, str(config_dir.relative_to(PACKAGE)), name, *overrides]): composed(
                folder, program, config_dir, name, overrides
            )
            for program, config_dir, name, overrides in cases(PACKAGE)
        },
        "plugin": "verl_sync_plugin.plugin" in sys.modules,
    }
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """Returns what a process with the plugin finds, and one without; both run at once."""
    running = []
    for plugins in ("auto", "none"):
        folder = tmp_path_factory.mktemp(plugins)
        environment = {**unmeasured.environment(), "VERL_USE_EXTERNAL_PLUGINS": plugins}
        command = [sys.executable, "-W", "ignore", "-m", "unit.test_shipped_configs", str(folder)]
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


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
