# SPDX-License-Identifier: Apache-2.0
"""Every code block of the pages for users is run, or where it needs a cluster composed and parsed.

A command that no check below knows fails: a new one needs a check.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydra_run import CONFIG_DIR, rollout_of, run
from shipped_configs import mains
from verl_sync_plugin import cli
from verl_sync_plugin import sharding_manager as registry
from verl_sync_plugin.config.settings import SyncConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\+?(?:actor_rollout_ref|trainer|model_engine|sync|ray_kwargs)[\w.]*=[^\s`]+\s*)+)`")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Of sites and of Ray: parsed by bash, and not run
OF_THE_CLUSTER = {"srun", "ray", "sleep", "set", "for", "done", "nodes", "head", "port"}
ASSIGNMENT = re.compile(r"^(\w+)=(.*)$", re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The blocks of a language, as parameters named by their page and place."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == language:
                found.append(pytest.param(match[2], id=f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"))
    return found


SCRIPTS = [pytest.param(file.read_text(encoding="utf-8"), id=file.name) for file in ROOT.glob("examples/slurm/*")]


def overrides_of(words: list[str], folder: Path) -> list[str]:
    """Runs a script of ours with a ``python3`` that notes its arguments; returns what it hands to verl's main."""
    start = words.index("bash")
    given = dict(word.split("=", 1) for word in words[:start] if ASSIGNMENT.match(word))
    (folder / "python3").write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" > {folder}/argv\n')
    (folder / "python3").chmod(0o755)
    given = {name: value.replace("$SLURM_JOB_NUM_NODES", "2") for name, value in given.items()}
    environment = {**os.environ, **given, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", *words[start + 1 :]], check=True, cwd=ROOT, env=environment, capture_output=True)
    written = (folder / "argv").read_text().split("\0")[:-1]
    assert written[:2] == ["-m", "verl.trainer.main_ppo"], written
    return written[2:]


def check(words: list[str], folder: Path) -> None:
    """Raises where one command of a page cannot work, or nobody says here how to check it."""
    if "bash" in words and any(word.startswith("examples/") for word in words):
        assert run(folder, *overrides_of(words, folder)).actor_rollout_ref.rollout.custom.sync.enabled, words
        return
    while words and ASSIGNMENT.match(words[0]) and words[0].partition("=")[0] not in OF_THE_CLUSTER:
        words = words[1:]
    if "verl-sync" in words:
        own = words[words.index("verl-sync") + 1 :]
        cli.parser_of(own).parse_args(own)
        return
    match words:
        case ["python", "-m", "verl.trainer.main_ppo", *overrides]:
            assert run(folder, *overrides).actor_rollout_ref.rollout.custom.sync.enabled
        case ["python", "-m", module, *overrides] if module.startswith("verl.experimental."):
            (main,) = [main for main in mains(CONFIG_DIR.parents[1]) if main.module == module]
            composed = run(folder, *overrides, name=main.name, config_dir=main.folder)
            assert composed.actor_rollout_ref.rollout.checkpoint_engine.backend == "sync_plugin"
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.(?:\[([\w-]+)\])?", what)
            assert extra and (extra[1] is None or extra[1] in EXTRAS), what
        case ["python", "examples/data/gsm8k.py", _]:
            pass  # needs the Hub; test_example_data.py shows that verl reads what it makes
        case _:
            assert re.split(r"[=\s]", words[0])[0] in OF_THE_CLUSTER, f"no check for {words}: add one here"


@pytest.mark.parametrize("block", [*blocks("bash"), *SCRIPTS])
def test_shell_block(block: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    for text in re.sub(r"\\\n\s*", " ", block).splitlines():
        if words := shlex.split(text.removesuffix(" &"), comments=True):
            check(words, tmp_path)


def test_settings_in_the_text_compose() -> None:
    texts = {" ".join(text.split()) for page in PAGES for text in INLINE.findall(page.read_text(encoding="utf-8"))}
    for text in sorted(text for text in texts if "…" not in text):
        rollout_of(*shlex.split(text))


@pytest.mark.parametrize("block", blocks("python"))
def test_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/extending.md also sends the parameters that it is given."""
    registry.get_sharding_manager("fsdp2", "sglang")  # the built-in ones are there before, and stay
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))
    if "SpmdRollout(" in block:
        return  # that needs ranks: tests/spmd runs the examples
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    if "replicated" in block:
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
        backend = registry.get_sharding_manager("replicated", "sglang").backend
        trainer = backend(SimpleNamespace(module=module), SyncConfig(), torch.device("cpu"), "bfloat16")
        shards = trainer.open_source().shards()
        assert [view.name for shard in shards for view in shard.base.views] == [
            name for name, _ in module.named_parameters()
        ]


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "verl_sync_plugin").rglob("*.py")))
    # Texts that are cut into lines in the code, and those with values, are compared without both
    code = re.sub(r"\{[A-Z]\w*\}", "KEY", re.sub(r'"\s*\n\s*f?"', "", code))
    quoted = [each for row in rows for each in re.findall(r"`([^`]+)`", row)]
    ours = [each for each in quoted if " " in each and "Could not override" not in each and "struct" not in each]
    assert len(ours) > 10
    templates = {"delivery is broadcast": "delivery is {self._chosen.name}"}
    assert [each for each in ours if templates.get(each, each) not in code] == []
