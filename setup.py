# SPDX-License-Identifier: Apache-2.0
"""Packages, and the commit that they are built from; everything else is in pyproject.toml."""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT, COMMIT, CONFIGS = Path(__file__).resolve().parent, Path("verl_sync_plugin", "COMMIT"), "verl_sync_plugin.configs"


def commit() -> str:
    """The commit of this checkout, or the one that a source distribution was made from; empty where none is known."""
    if not (ROOT / ".git").exists():
        return (ROOT / COMMIT).read_text(encoding="utf-8") if (ROOT / COMMIT).exists() else ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git here
        return ""


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install has no copy of the package
            (Path(self.build_lib) / COMMIT).write_text(commit(), encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / COMMIT)]


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT).write_text(commit(), encoding="utf-8")


setup(
    packages=[
        *find_packages(include=["verl_sync_plugin", "verl_sync_plugin.*"]),
        CONFIGS,
        f"{CONFIGS}.sync",
        f"{CONFIGS}.hydra.callbacks",
    ],
    package_dir={CONFIGS: "configs"},
    package_data={"": ["py.typed", "*.yaml"]},
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
)
