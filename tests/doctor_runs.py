# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor`` in a process of its own, in environments that are broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Told:
    """Exit status, JSON and other output of the doctor."""

    code: int
    found: dict[str, Any]
    stderr: str

    @property
    def findings(self) -> dict[str, dict[str, str]]:
        """Lists the findings on the first node, and on all together, by check."""
        every = [*self.found["nodes"][0]["findings"], *self.found["findings"]]
        return {each["check"]: each for each in every}

    @property
    def bad(self) -> dict[str, str]:
        """Levels of what is not ok, by check."""
        return {check: each["level"] for check, each in self.findings.items() if each["level"] != "ok"}


def doctor(folder: Path, *arguments: str, **environment: str) -> Told:
    """Runs it away from the source tree, with ``environment`` on top of this process's."""
    ended = subprocess.run(
        [sys.executable, "-m", "verl_sync_plugin.cli", "doctor", "--json", *arguments],
        cwd=folder, env={**os.environ, "VERL_PLATFORM": "cpu", **environment},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.stdout.startswith("{"), ended.stderr[-3000:]
    return Told(ended.returncode, json.loads(ended.stdout), ended.stderr)


def first_in_path(folder: Path) -> str:
    """``PYTHONPATH`` with a folder before everything else."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def stand_in(folder: Path, package: str, version: str) -> str:
    """``PYTHONPATH`` with metadata in front that say that another version of a package is installed."""
    metadata = folder / "metadata" / f"{package}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return first_in_path(metadata.parent)
