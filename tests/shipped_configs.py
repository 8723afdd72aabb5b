# SPDX-License-Identifier: Apache-2.0
"""Imports every main of verl, and composes every config that one can be given, in one process.

Run as ``python -m shipped_configs FOLDER`` in the folder that holds the package ``verl``, since verl's experimental
configs name theirs relative to it; leaves ``FOLDER/found.json``.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    from omegaconf import OmegaConf

    import hydra_run

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
    import verl

    package = Path(verl.__file__).resolve().parent
    found = {
        "mains": {main.module: imported(main.module) for main in mains(package)},
        "configs": {
            " ".join([program, str(config_dir.relative_to(package)), name, *overrides]): composed(
                folder, program, config_dir, name, overrides
            )
            for program, config_dir, name, overrides in cases(package)
        },
        "plugin": "verl_sync_plugin.plugin" in sys.modules,
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
