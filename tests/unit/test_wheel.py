# SPDX-License-Identifier: Apache-2.0
"""What a plain ``pip install`` brings: modules, configs and entry points."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the sources: building leaves folders behind that a later build would pick up."""
    source = tmp_path_factory.mktemp("source") / "project"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("verl_sync_plugin", "configs", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = source.parent / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


class TestWheel:
    """What a plain ``pip install`` puts into site-packages."""

    def test_holds_every_module_and_config(self, wheel: zipfile.ZipFile) -> None:
        names = set(wheel.namelist())
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_sync_plugin").rglob("*.py")}
        configs = {f"verl_sync_plugin/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
        assert configs
        assert modules | configs <= names

    def test_installs_nothing_beside_the_package(self, wheel: zipfile.ZipFile) -> None:
        roots = {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name}
        assert roots == {"verl_sync_plugin"}  # no .pth: nothing runs while Python starts

    def test_entry_points(self, wheel: zipfile.ZipFile) -> None:
        (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        entries = configparser.ConfigParser()
        entries.read_string(wheel.read(name).decode())
        assert dict(entries["verl.plugins"]) == {"verl_sync_plugin": "verl_sync_plugin.plugin"}
        assert dict(entries["console_scripts"]) == {"verl-sync": "verl_sync_plugin.cli:main"}

    def test_version_is_the_package_s(self, wheel: zipfile.ZipFile) -> None:
        import verl_sync_plugin

        assert f"verl_sync_plugin-{verl_sync_plugin.__version__}" in Path(wheel.filename or "").name
