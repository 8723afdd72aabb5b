# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor`` in a process of its own, in environments that are broken on purpose."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl_sync_plugin

PACKAGE = Path(verl_sync_plugin.__file__).resolve().parent
SECONDS = 180


@dataclass(frozen=True)
class Told:
    """What the doctor said.

    Attributes:
        code: its exit status.
        found: its JSON.
        stderr: what else it wrote.
    """

    code: int
    found: dict[str, Any]
    stderr: str

    @property
    def findings(self) -> dict[str, dict[str, str]]:
        """Of the first node, and of all together, by check."""
        every = [*self.found["nodes"][0]["findings"], *self.found["findings"]]
        return {each["check"]: each for each in every}

    @property
    def bad(self) -> dict[str, str]:
        """Levels of what is not ok, by check."""
        return {check: each["level"] for check, each in self.findings.items() if each["level"] != "ok"}


def doctor(
    folder: Path, *arguments: str, python: str = sys.executable, files: int | None = None, **environment: str
) -> Told:
    """Runs it away from the source tree.

    Args:
        folder: its working directory.
        python: of the environment that is looked at.
        files: soft limit of open files.
        environment: variables on top of this process's.
    """

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    ended = subprocess.run(
        [python, "-m", "verl_sync_plugin.cli", "doctor", "--json", *arguments],
        cwd=folder,
        env={**os.environ, "VERL_PLATFORM": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=limit,
    )
    assert ended.stdout.startswith("{"), ended.stderr[-3000:]
    return Told(ended.returncode, json.loads(ended.stdout), ended.stderr)


def first_in_path(folder: Path) -> str:
    """``PYTHONPATH`` with a folder before everything else."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def broken_copy(folder: Path, module: str) -> str:
    """``PYTHONPATH`` with a copy of the plugin in front, of which one module cannot be imported."""
    copy = folder / "broken" / "verl_sync_plugin"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / module).write_text("raise ImportError('broken on purpose')\n")
    return first_in_path(copy.parent)


def stand_in(folder: Path, package: str, version: str) -> str:
    """``PYTHONPATH`` with metadata in front that say that another version of a package is installed."""
    metadata = folder / "metadata" / f"{package}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return first_in_path(metadata.parent)


def environment_without(folder: Path, *left_out: str) -> str:
    """The python of a virtual environment with everything of this one, but for some names in ``site-packages``.

    Args:
        left_out: beginnings of names there.
    """
    here, home = Path(sysconfig.get_path("purelib")), folder / "environment"
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    base = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    (home / "bin" / "python").symlink_to(base)
    (home / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for each in here.iterdir():
        if not each.name.startswith(left_out):
            (site / each.name).symlink_to(each)
    return str(home / "bin" / "python")
