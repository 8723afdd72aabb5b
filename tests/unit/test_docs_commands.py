# SPDX-License-Identifier: Apache-2.0
"""Every code block of the pages for users is run, or where it needs a cluster composed and parsed.

A block in a language, and a command, that no check below knows fails: a new one needs a check.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydra_run import rollout_of, run
from verl_sync_plugin import sharding_manager as registry
from verl_sync_plugin.cli import entry
from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Plan
from verl_sync_plugin.sync.sender import BucketSender

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\+?(?:actor_rollout_ref|trainer|model_engine|sync|ray_kwargs)[\w.]*=[^\s`]+\s*)+)`")
# Of sites and of Ray: parsed by bash, and not run
OF_THE_CLUSTER = {"srun", "ray", "sleep", "set", "for", "done", "nodes", "head", "port"}
ASSIGNMENT = re.compile(r"^(\w+)=(.*)$", re.DOTALL)


def blocks(*languages: str) -> list[Any]:
    """The blocks of some languages, as parameters named by their page and place."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                line = text[: match.start()].count("\n") + 1
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a shell block, as words; loops and assignments too, by their first word."""
    for text in re.sub(r"\\\n\s*", " ", block).splitlines():
        words = shlex.split(text.removesuffix(" &"), comments=True)
        if words:
            yield words


def overrides_of(words: list[str], folder: Path) -> list[str]:
    """What a script of ours hands to verl's main: it runs, with a ``python3`` that writes its arguments down."""
    start = words.index("bash")
    given = dict(word.split("=", 1) for word in words[:start] if ASSIGNMENT.match(word))
    fake = folder / "python3"
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" > {folder}/argv\n')
    fake.chmod(0o755)
    given = {name: value.replace("$SLURM_JOB_NUM_NODES", "2") for name, value in given.items()}
    environment = {**os.environ, **given}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", *words[start + 1 :]], check=True, cwd=ROOT, env=environment, capture_output=True, timeout=60
    )
    written = (folder / "argv").read_text().split("\0")[:-1]
    assert written[:2] == ["-m", "verl.trainer.main_ppo"], written
    return written[2:]


def check(words: list[str], folder: Path) -> None:
    """One command of a page.

    Raises:
        AssertionError: it cannot work, or nobody says here how to check it.
    """
    if "bash" in words and any(word.startswith("examples/") for word in words):
        config = run(folder, *overrides_of(words, folder))
        assert config.actor_rollout_ref.rollout.custom.sync.enabled, words
        return
    while words and ASSIGNMENT.match(words[0]) and words[0].partition("=")[0] not in OF_THE_CLUSTER:
        words = words[1:]
    if "verl-sync" in words:
        parsed(words[words.index("verl-sync") + 1 :])
        return
    match words:
        case ["python", "-m", "verl.trainer.main_ppo", *overrides]:
            assert run(folder, *overrides).actor_rollout_ref.rollout.custom.sync.enabled
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["pip", "install", what]:
            extra = re.fullmatch(r"\.(?:\[([\w-]+)\])?", what)
            assert extra and (extra[1] is None or f'"{extra[1]}":' in (ROOT / "setup.py").read_text()), what
        case ["python", "examples/data/gsm8k.py", _]:
            pass  # needs the Hub; test_example_data.py shows that verl reads what it makes
        case _:
            assert re.split(r"[=\s]", words[0])[0] in OF_THE_CLUSTER, f"no check for {words}: add one here"


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The arguments of ``verl-sync``, parsed by its own parsers."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in entry.COMMANDS:
        command.add_parser(subparsers)
    return parser.parse_args(arguments)


def test_every_block_says_its_language() -> None:
    known = {"bash", "python", "mermaid"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(BLOCK.findall(text)), page
        assert {language for language, _ in BLOCK.findall(text)} <= known, page


@pytest.mark.parametrize("block", blocks("bash"))
def test_shell_block(block: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    for words in commands(block):
        check(words, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "make nowhere",
        "pip install .[nothing]",
        "verl-sync repport reports.jsonl",
        "curl example",
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang actor_rollout_ref.no_such_key=1",
        "NGPUS=8 bash examples/fsdp_sglang/run_qwen2_5_7b_fsdp2.sh actor_rollout_ref.no_such_key=1",
    ],
)
def test_a_command_that_cannot_work_is_found(command: str, tmp_path: Path) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(command), tmp_path)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block registers is gone behind its test; the built-in managers are there before, and stay."""
    registry.get_sharding_manager("fsdp2", "sglang")
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("block", blocks("python"))
def test_python_block_runs(block: str) -> None:
    code = compile(block, "docs", "exec")
    if "SpmdRollout(" not in block:  # that needs ranks: tests/spmd runs the examples
        exec(code, {"__name__": "docs"})


@pytest.mark.usefixtures("own_registry")
def test_the_worked_trainer_sends_its_parameters() -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (block,) = [body for language, body in BLOCK.findall(text) if language == "python"]
    space: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block, "docs/extending.md", "exec"), space)
    manager = registry.get_sharding_manager("replicated", "sglang")
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
    engine = SimpleNamespace(module=module)
    trainer = manager.backend(engine, SyncConfig(), torch.device("cpu"), "bfloat16")
    source = trainer.open_source()
    shards = source.shards()
    plan = source.plan(tuple(shard.base for shard in shards), 1 << 20)
    received = packed(plan, shards)
    assert list(received) == [name for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        assert torch.equal(received[name], parameter.detach().bfloat16()), name


def packed(plan: Plan, shards: list[Shard]) -> dict[str, torch.Tensor]:
    """The tensors that one rank packs into its staging memory, in one bucket."""
    (bucket,) = plan.buckets
    sender = BucketSender(torch.device("cpu"), 10.0)
    try:
        sender.reserve(plan)
        sender.begin(plan, 0, hashed=True, finite=True)
        sender.pack(0, 0, shards)
        sender.drain(0)
        assert sender.broken() == []
        memory = sender._slot(0).clone()
    finally:
        sender.close()
    tensors = {}
    for entry_ in bucket.entries:
        (piece,) = entry_.pieces
        raw = memory[piece.source : piece.source + piece.width].clone()
        tensors[entry_.name] = raw.view(torch.bfloat16).reshape(entry_.shape)
    return tensors


def inline_settings() -> list[Any]:
    """Settings in running text and tables, each once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for text in INLINE.findall(page.read_text(encoding="utf-8")):
            found.setdefault(" ".join(text.split()), page.name)
    return [pytest.param(text, id=f"{page}:{text[:60]}") for text, page in found.items() if "…" not in text]


@pytest.mark.parametrize("settings", inline_settings())
def test_settings_in_the_text_compose(settings: str, tmp_path: Path) -> None:
    rollout_of(tmp_path, *shlex.split(settings))


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "verl_sync_plugin").rglob("*.py")))
    # Texts that are cut into lines in the code, and those with values, are compared without both
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    code = re.sub(r"\{[A-Z]\w*\}", "KEY", code)
    quoted = [each for row in rows for each in re.findall(r"`([^`]+)`", row)]
    ours = [each for each in quoted if " " in each and "Could not override" not in each and "struct" not in each]
    assert len(ours) > 15
    templates = {"delivery is gathered": "delivery is {chosen.name}"}
    assert [each for each in ours if templates.get(each, each) not in code] == []


def test_report_command_of_the_quickstart_runs(tmp_path: Path) -> None:
    line = {"event": "sync_report", "global_steps": 0, "stages": {"update_weights": 1.0}, "nbytes": 10}
    (tmp_path / "reports.jsonl").write_text(json.dumps(line) + "\n")
    text = (ROOT / "docs" / "quickstart-cluster.md").read_text(encoding="utf-8")
    (words,) = [shlex.split(found) for found in re.findall(r"^verl-sync report .*$", text, re.MULTILINE)]
    assert entry.main([words[1], str(tmp_path / words[2])]) == 0
    assert (tmp_path / "sync-report.html").exists()
