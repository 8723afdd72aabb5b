# SPDX-License-Identifier: Apache-2.0
"""Checks what a plain ``pip install`` brings: modules, configs and entry points."""

import configparser
import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import verl_sync_plugin
from fresh_process import said

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Builds a wheel of a copy of the sources, since building leaves folders that a later build would pick up."""
    source = tmp_path_factory.mktemp("source") / "project"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("verl_sync_plugin", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "verl_sync_plugin" / "COMMIT").write_text("1a2b3c4d5e6f")  # as in a source distribution
    target = source.parent / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def read(wheel: zipfile.ZipFile, ending: str) -> bytes:
    (name,) = (name for name in wheel.namelist() if name.endswith(ending))
    return wheel.read(name)


def test_holds_every_module_and_config_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_sync_plugin").rglob("*.py")}
    configs = {f"verl_sync_plugin/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs and modules | configs | {"verl_sync_plugin/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"verl_sync_plugin"}  # no .pth: nothing runs while Python starts


def test_metadata_are_those_that_an_index_shows(wheel: zipfile.ZipFile) -> None:
    entries = configparser.ConfigParser()
    entries.read_string(read(wheel, "entry_points.txt").decode())
    assert dict(entries["verl.plugins"]) == {"verl_sync_plugin": "verl_sync_plugin.plugin"}
    assert dict(entries["console_scripts"]) == {"verl-sync": "verl_sync_plugin.cli:main"}
    found = email.message_from_bytes(read(wheel, ".dist-info/METADATA"))
    assert found["License-Expression"] == "Apache-2.0" and found["Keywords"] and found["Summary"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    needed = found.get_all("Requires-Dist", [])
    assert set(found.get_all("Provides-Extra", [])) == {"verl", "sglang", "megatron", "report"}
    assert 'sglang<0.5.15,>=0.5.12; extra == "sglang"' in needed
    assert not [each for each in needed if "pytest" in each], "the tools of the tests are a dependency group"


def test_says_its_version_and_the_commit_that_it_was_built_from(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    assert f"verl_sync_plugin-{verl_sync_plugin.__version__}-" in Path(wheel.filename or "").name
    wheel.extractall(tmp_path)
    code = "from verl_sync_plugin.cli import main; main(['--version'])"
    expected = f"verl-sync {verl_sync_plugin.__version__} (1a2b3c4d5e6f)"
    assert said(tmp_path, code, PYTHONPATH=str(tmp_path)) == expected
