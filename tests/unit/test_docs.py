# SPDX-License-Identifier: Apache-2.0
"""Checks that what the documentation names is there, and runs or parses its commands; an unknown one needs a check."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from omegaconf import OmegaConf
from test_shipped_configs import mains
from verl.trainer.ppo.utils import need_critic

import pages
from contract.families import FAMILIES
from e2e.releases import PAGE, RELEASES, rows, table
from hydra_run import CONFIG_DIR, rollout_of, run
from verl_sync_plugin import cli
from verl_sync_plugin import sharding_manager as registry
from verl_sync_plugin.config.settings import LONG_BUCKET_KEY, SHORT_BUCKET_KEY, SyncConfig
from verl_sync_plugin.report import SyncReport

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "verl_sync_plugin"
DESIGN = ROOT / "docs" / "design"
USER_PAGES = ("quickstart-cluster", "doctor", "spmd", "keys", "lora", "separate", "watch", "memory-guide", "failures")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Sections of the changelog that name what is gone
GONE = re.compile(r"^### (?:Dropped|Moved)\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?<![\w./$-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|yaml|sh|toml|txt|svg|json))(?![\w/])")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TITLE = re.compile(r"\[([^\]]*)\]\([^)\s]+\)")
RESULT = re.compile(r"`((?:dense|moe|transfer|soak|rollouts)-[\w-]+)`")
# Files of others that the package's docstrings name
UPSTREAM = ("core/inference/contexts/dynamic_context.py",)


def text_of(page: Path) -> str:
    return GONE.sub("", page.read_text())


def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted(PACKAGE.rglob("*.py"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_or_a_docstring_names_exists(page: Path) -> None:
    text = text_of(page)
    named = {path for path in PATH.findall(LINK.sub("", text)) if not path.startswith("http")} - {*UPSTREAM}
    assert [path for path in named if not any((at / path).exists() for at in (ROOT, PACKAGE, page.parent))] == []
    for target in LINK.findall(text) if page.suffix == ".md" else ():
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert "://" in target or linked.exists(), target
        assert "://" in target or not anchor or anchor in heading_anchors(linked), target
    results = [name for name in RESULT.findall(text) if not list((ROOT / "benchmarks" / "results").glob(f"{name}*"))]
    assert results == []


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    text = (ROOT / "docs" / "keys.md").read_text()
    section = text.partition("## The sync")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    fields = {field.name: field.default for field in msgspec.structs.fields(SyncConfig)}
    assert [name for name, _ in rows] and sorted(name for name, _ in rows) == sorted(fields)
    for name, default in rows:
        values = fields[name] if isinstance(fields[name], tuple) else (fields[name],)
        for value in values:
            assert (f"{value:g}" if isinstance(value, float) else str(value)) in default, name
    for key in (SHORT_BUCKET_KEY, LONG_BUCKET_KEY):
        assert f"| `{key.removeprefix('actor_rollout_ref.rollout.')}` |" in text


def test_pages_are_short_and_have_what_their_kind_has() -> None:
    """A page for users four sections; a chapter a picture and its place in the list."""
    assert (ROOT / "README.md").read_text().count("\n") <= 120
    listed = LINK.findall((DESIGN / "README.md").read_text())
    for chapter in sorted(DESIGN.glob("*.md")):
        text = chapter.read_text()
        assert len(text.splitlines()) <= 120, chapter
        assert chapter.name == "README.md" or (chapter.name in listed and "```mermaid" in text[:200]), chapter
    for page in USER_PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert all(f"\n## {each}\n" in text for each in ("When to use", "Turn on", "What it costs", "Limits")), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    """At most 25 words each, in text and in cells of tables. What is generated, and the changelog, are exempt."""
    exempt = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->|^```.*?^```$", re.DOTALL | re.MULTILINE)
    text = TITLE.sub(r"\1", exempt.sub("", text_of(page))).replace("**", "")
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )|(?<!\\)\|", text)
    sentences = [sentence for block in blocks for sentence in re.split(r"(?<=[.?!])\)?\s", block)]
    assert page.name == "CHANGELOG.md" or [each for each in sentences if len(each.split()) > 25] == []


def test_every_release_and_family_has_its_row_and_the_readme_names_the_releases() -> None:
    found = rows()
    pages.check(PAGE, "releases", table(found))
    packages = {release: tuple(re.findall(r"`([^`]+)`", row.split(" | ")[1])) for release, row in found.items()}
    assert packages == {release: tuple(names) for release, names in RELEASES.items()}, "write it again: make releases"
    tested = re.search(r"Tested with verl \S+; SGLang ([^;]+);", (ROOT / "README.md").read_text())
    assert tested is not None and re.findall(r"\d+\.\d+\.\d+", tested[1]) == list(RELEASES)
    _, _, *lines = pages.part((ROOT / "docs" / "families.md").read_text(), "families").splitlines()
    names = [name for line in lines for name in line.split(" | ")[0].strip("| ").split("; ")]
    assert sorted(names) == sorted(FAMILIES), "write it again: make families"


OF_COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\+?(?:actor_rollout_ref|trainer|model_engine|sync|ray_kwargs)[\w.]*=[^\s`]+\s*)+)`")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Of sites and of Ray: parsed by bash, and not run
OF_THE_CLUSTER = {"srun", "ray", "sleep", "set", "for", "done", "nodes", "head", "port"}
ASSIGNMENT = re.compile(r"^(\w+)=(.*)$", re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The blocks of a language, as parameters named by their page and place."""
    return [
        pytest.param(match[2], id=f"{page.name}:{text[: match.start()].count(chr(10)) + 1}")
        for page in OF_COMMANDS
        for text in [page.read_text()]
        for match in BLOCK.finditer(text)
        if match[1] == language
    ]


SCRIPTS = [pytest.param(file.read_text(), id=file.name) for file in ROOT.glob("examples/slurm/*")]


def overrides_of(words: list[str], folder: Path) -> list[str]:
    """Runs an example's script with a ``python3`` that notes its arguments; returns what it hands to verl's main."""
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
            composed = run(folder, *overrides)
            assert composed.actor_rollout_ref.rollout.custom.sync.enabled
            assert not need_critic(composed), "a critic would need more keys"
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
            pass  # needs the Hub; what it makes of a row is read below
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
    found = {" ".join(text.split()) for page in OF_COMMANDS for text in INLINE.findall(page.read_text())}
    for text in sorted(text for text in found if "…" not in text):
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
        sent = [view.name for shard in trainer.open_source().shards() for view in shard.base.views]
        assert sent == [name for name, _ in module.named_parameters()]


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    code = "".join(file.read_text() for file in sorted((ROOT / "verl_sync_plugin").rglob("*.py")))
    # Texts that are cut into lines in the code, and those with values, are compared without both
    code = re.sub(r"\{[A-Z]\w*\}", "KEY", re.sub(r'"\s*\n\s*f?"', "", code))
    quoted = [each for row in rows for each in re.findall(r"`([^`]+)`", row)]
    ours = [each for each in quoted if " " in each and "Could not override" not in each and "struct" not in each]
    templates = {"delivery is broadcast": "delivery is {self._chosen.name}"}
    assert len(ours) > 10
    assert [each for each in ours if templates.get(each, each) not in code] == []


@pytest.mark.slow
def test_verl_reads_and_rewards_a_row_of_the_example_data(tmp_path: Path, tiny_model: Any) -> None:
    import datasets
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.reward_score import default_compute_score

    row = runpy.run_path(str(ROOT / "examples" / "data" / "gsm8k.py"))["row"]
    made = row("How many did she sell?", "She sold 1,200 + 34 of them.\n#### 1,234", "train", 3)
    datasets.Dataset.from_list([made]).to_parquet(str(tmp_path / "train.parquet"))
    settings = OmegaConf.create({"max_prompt_length": 512, "cache_dir": str(tmp_path)})
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen2"))
    read = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, settings)[0]
    assert "How many did she sell?" in str(read["raw_prompt"]) and read["index"] == 3
    for answer, reward in (("1234", 1.0), ("1235", 0.0)):
        said = f"... so it is\n#### {answer}"
        assert default_compute_score(read["data_source"], said, read["reward_model"]["ground_truth"]) == reward
    with pytest.raises(ValueError, match="test 7"):
        row("?", "no number", "test", 7)


STAND_IN = """#!/bin/bash
case "$*" in
    *verl_sync_plugin.cli*) exec {python} "$@" ;;
    *"-m verl.trainer.main_ppo"*)
        echo "a line of somebody else's"
        [[ $SYNCS == no ]] || cat {folder}/report >> "$VERL_SYNC_REPORT_FILE"
        [[ $SYNCS == no ]] || echo "(TaskRunner pid=7) [verl-sync-plugin] pid 7 {line}"
        echo "(TaskRunner pid=7) step:1 - a/b:1 - c/d:2"
        echo "${{WORDS:-step:2 - a/b:1}}"
        exit ${{ENDS:-0}} ;;
esac
"""


def quickstart(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    report = SyncReport.begun(1, "Manager", rank=0)
    report.delivery, report.tensors, report.nbytes, report.hashed_tensors = "in place", 27, 230_000, 27
    report.note_stage("update_weights", 0.0, 0.25)
    (folder / "report").write_text(json.dumps({"event": "sync_report", **report.as_dict()}) + "\n")
    (folder / "python").write_text(STAND_IN.format(python=sys.executable, folder=folder, line=report.line()))
    (folder / "python").chmod(0o755)
    command = ["bash", str(ROOT / "examples" / "cpu_quickstart" / "run.sh")]
    environment = {**os.environ, "PYTHON": f"{folder}/python", "WORK": f"{folder}/work", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_the_quickstart_ends_with_five_lines_and_leaves_log_and_page_or_shows_the_logs_end(tmp_path: Path) -> None:
    """Without syncs, or with a file of the user's for the reports, it makes no page."""
    ended, work = quickstart(tmp_path), tmp_path / "work"
    first, sync, one, two, *last = ended.stdout.splitlines()
    assert ended.returncode == 0 and str(work / "run.log") in first and [one, two] == ["step:1 ", "step:2 "]
    assert sync == "[verl-sync-plugin] pid 7 sync of step 1: 0.250 s, 27 tensors, 0.23 MB, in place, hashed 27"
    parts = ("quickstart: reached step 2", "sync of step 1: 0.250 s", f"{work}/sync-report.html", f"{work}/run.log")
    assert all(part in line for part, line in zip((*parts, "verl-sync doctor"), last, strict=True))
    assert "a line of somebody else's" in (work / "run.log").read_text()
    (work / "sync-report.html").unlink()
    for shown in ("plugin", "all"):
        ended = quickstart(tmp_path, SYNCS="no", SHOW=shown, VERL_SYNC_REPORT_FILE=f"{tmp_path}/mine.jsonl")
        assert ended.returncode == 0 and ("somebody else's" in ended.stdout) is (shown == "all")
        assert "stock verl moved the weights" in ended.stdout and f"{tmp_path}/mine.jsonl" in ended.stdout
    assert not (work / "sync-report.html").exists()
    for ends, words, code in (("3", "step:2 - a", 3), ("0", "no more steps", 1)):
        ended = quickstart(tmp_path, ENDS=ends, WORDS=words)
        assert ended.returncode == code and "somebody else's" in ended.stderr and "reached" not in ended.stdout
