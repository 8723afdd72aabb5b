# SPDX-License-Identifier: Apache-2.0
"""Runs code, tests and the doctor in a fresh interpreter, with other plugins and releases first in ``PYTHONPATH``."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import verl_sync_plugin

PACKAGE = Path(verl_sync_plugin.__file__).resolve().parent


def _run(folder: Path, words: list[str], environment: dict[str, str], seconds: int) -> subprocess.CompletedProcess[str]:
    """Away from the source tree, with ``environment`` on top of this process's."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


def python(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run(folder, ["-c", textwrap.dedent(code)], environment, 120)


def said(folder: Path, code: str, **environment: str) -> str:
    """Returns the output of code that ends well."""
    ended = python(folder, code, **environment)
    # Python reports a failing .pth line on stderr, and goes on
    assert ended.returncode == 0 and "Error processing line" not in ended.stderr, ended.stderr
    return ended.stdout.strip()


def passed(*arguments: str, **environment: str) -> str:
    """Returns what a pytest of its own says, none of whose tests has failed; paths are in this folder."""
    run = _run(Path(__file__).parent, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], environment, 500)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


class Told(NamedTuple):
    """Exit status, JSON and other output of the doctor."""

    code: int
    found: dict[str, Any]
    stderr: str

    @property
    def findings(self) -> dict[str, dict[str, str]]:
        """Lists the findings on the first node, and on all together, by check; what is wrong before what is ok."""
        every = [*self.found["nodes"][0]["findings"], *self.found["findings"]]
        return {each["check"]: each for each in sorted(every, key=lambda each: each["level"] != "ok")}

    @property
    def bad(self) -> dict[str, str]:
        """Levels of what is not ok, by check."""
        return {check: each["level"] for check, each in self.findings.items() if each["level"] != "ok"}


def doctor(folder: Path, *arguments: str, **environment: str) -> Told:
    words = ["-m", "verl_sync_plugin.cli", "doctor", "--json", *arguments]
    ended = _run(folder, words, {"VERL_PLATFORM": "cpu", **environment}, 180)
    assert ended.stdout.startswith("{"), ended.stderr[-3000:]
    return Told(ended.returncode, json.loads(ended.stdout), ended.stderr)


def first_in_path(folder: Path) -> str:
    """``PYTHONPATH`` with a folder before everything else."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _metadata(folder: Path, package: str, version: str) -> Path:
    made = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return made


def stand_in(folder: Path, package: str, version: str) -> str:
    """``PYTHONPATH`` with metadata in front that say that another version of a package is installed."""
    return first_in_path(_metadata(folder / "metadata", package, version).parent)


def other_plugin(folder: Path, code: str) -> Path:
    """Installs another plugin of verl, which is found and loaded before ours."""
    site = folder / "site"
    (_metadata(site, "other-plugin", "1.0") / "entry_points.txt").write_text("[verl.plugins]\nother = other_plugin\n")
    (site / "other_plugin.py").write_text(textwrap.dedent(code))
    return site


def broken(folder: Path, module: str) -> Path:
    """A folder with a copy of the plugin, one of whose modules cannot be imported."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / module).write_text("raise ImportError('broken on purpose')\n")
    return folder


def folder_with(factory: pytest.TempPathFactory, *packages: str) -> Path:
    """Installs packages without what they require; ``SYNC_TEST_PACKAGES`` names a place that keeps such folders."""
    kept = os.environ.get("SYNC_TEST_PACKAGES")
    folder = (Path(kept) if kept else factory.mktemp("packages")) / "+".join(packages)
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder
