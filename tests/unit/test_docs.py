# SPDX-License-Identifier: Apache-2.0
"""Checks that what the documentation names is there: files, links, keys, results, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest
from verl.trainer.ppo.utils import need_critic

from contract.families import FAMILIES
from e2e.releases import PAGE, RELEASES, rows, written
from hydra_run import run
from verl_sync_plugin.config.settings import LONG_BUCKET_KEY, SHORT_BUCKET_KEY, SyncConfig

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
    return GONE.sub("", page.read_text(encoding="utf-8"))


def missing_paths(text: str, *folders: Path) -> list[str]:
    """The paths in ``text`` that none of the folders has."""
    named = sorted({path for path in PATH.findall(text) if not path.startswith("http") and path not in UPSTREAM})
    return [path for path in named if not any((folder / path).exists() for folder in folders)]


def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = text_of(page)
    assert missing_paths(LINK.sub("", text), ROOT, PACKAGE, page.parent) == []
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in heading_anchors(linked), target
    results = [name for name in RESULT.findall(text) if not list((ROOT / "benchmarks" / "results").glob(f"{name}*"))]
    assert results == []


def test_what_docstrings_name_exists() -> None:
    wrong = {
        str(file.relative_to(ROOT)): missing
        for file in sorted(PACKAGE.rglob("*.py"))
        if (missing := missing_paths(file.read_text(encoding="utf-8"), ROOT, PACKAGE, file.parent))
    }
    assert wrong == {}


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    text = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
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


def test_every_chapter_opens_with_a_picture_and_is_listed() -> None:
    listed = LINK.findall((DESIGN / "README.md").read_text(encoding="utf-8"))
    for chapter in sorted(DESIGN.glob("*.md")):
        text = chapter.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120, chapter
        assert chapter.name == "README.md" or (chapter.name in listed and "```mermaid" in text[:200]), chapter


@pytest.mark.parametrize("page", USER_PAGES)
def test_a_page_for_users_says_when_how_cost_and_limits(page: str) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"When to use", "Turn on", "What it costs", "Limits"} <= set(headings)


def test_pages_are_short() -> None:
    lines = {page: page.read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert lines[ROOT / "README.md"] <= 120
    assert sum(count for page, count in lines.items() if ROOT / "docs" in page.parents) <= 2000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    """At most 25 words each, in text and in cells of tables. What is generated, and the changelog, are exempt."""
    exempt = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->|^```.*?^```$", re.DOTALL | re.MULTILINE)
    text = TITLE.sub(r"\1", exempt.sub("", text_of(page))).replace("**", "")
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )|(?<!\\)\|", text)
    sentences = [sentence for block in blocks for sentence in re.split(r"(?<=[.?!])\)?\s", block)]
    assert page.name == "CHANGELOG.md" or [each for each in sentences if len(each.split()) > 25] == []


def test_the_walk_names_every_file_once() -> None:
    text = (ROOT / "docs" / "one-weight.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+|–) \| `([\w/]+\.py)` \|", text, re.MULTILINE)
    files = [file for _, file in rows]
    numbers = [int(number) for number, _ in rows if number != "–"]
    assert len(files) == len(set(files)) and all((PACKAGE / file).is_file() for file in files)
    assert numbers == list(range(1, len(numbers) + 1)) and 15 <= len(numbers) <= 27
    walk = text.partition("<!-- files:begin -->")[0]
    assert not {file for file in files if walk.count(f"`{file}`") > 1}


def test_the_readmes_command_is_one_that_a_run_takes(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m verl\.trainer\.main_ppo \\\n(?:.*\\\n)*.*$", text, re.MULTILINE)
    overrides = shlex.split(command.replace("\\\n", " "))[3:]
    config = run(tmp_path, *overrides)
    assert not need_critic(config), "a critic would need more keys"
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == "sglang" and rollout.custom.sync.enabled and rollout.update_weights_bucket_megabytes == 512


# The tables that ``make families`` and ``make releases`` write are those of the tests and of the pinned stack


def test_every_release_has_its_row_of_this_stack() -> None:
    page = PAGE.read_text()
    assert list(rows(page)) == list(RELEASES), "write it again: make releases"
    assert written(page, rows(page)) == page, "write it again: make releases"


@pytest.mark.parametrize("release", RELEASES)
def test_a_row_names_what_was_installed_beside(release: str) -> None:
    beside = rows(PAGE.read_text())[release].split(" | ")[1]
    assert re.findall(r"`([^`]+)`", beside) == list(RELEASES[release]), "write it again: make releases"


def test_the_readme_names_these_releases() -> None:
    tested = re.search(r"Tested with verl \S+; SGLang ([^;]+);", (ROOT / "README.md").read_text())
    assert tested is not None
    assert re.findall(r"\d+\.\d+\.\d+", tested[1]) == list(RELEASES)


def test_every_family_has_its_row() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    table = page.partition("<!-- families:begin -->")[2].partition("<!-- families:end -->")[0]
    names = [name for line in table.splitlines()[3:] for name in line.split(" | ")[0].strip("| ").split("; ")]
    assert sorted(names) == sorted(FAMILIES), "write it again: make families"
