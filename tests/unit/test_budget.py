# SPDX-License-Identifier: Apache-2.0
"""``.ci/budget.py``: the size of the project only goes down."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "budget.py"


def budget(path: Path = SCRIPT) -> ModuleType:
    spec = importlib.util.spec_from_file_location("budget", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_is_what_is_no_comment_docstring_or_import() -> None:
    text = '"""Doc."""\n\nimport os\n\ndef f(\n    a,  # why\n):\n    """Two\n    lines."""\n    return """a\nb"""\n'
    assert budget().code_lines(text) == 5


def test_a_room_that_grows_and_a_ceiling_that_rises_are_named(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    def check(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, str(tmp_path / ".ci/budget.py"), *words], capture_output=True, text=True)
        return done.returncode, done.stderr

    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    for room in budget().ROOMS:
        (tmp_path / room).mkdir()
    product, ceilings = tmp_path / "verl_sync_plugin" / "a.py", tmp_path / ".ci" / "budget.toml"
    product.write_text("a = 1\n")
    assert check("--lower") == (0, "") and check() == (0, "")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    product.write_text("a = 1\nb = 2\n")
    code, said = check()
    assert code == 1 and "verl_sync_plugin: 2 lines, above 1, the ceiling in .ci/budget.toml" in said
    assert check("--lower") == (0, "") and check()[0] == 1, "--lower does not raise"
    ceilings.write_text(ceilings.read_text().replace("lines = 1", "lines = 2").replace("code = 1", "code = 2"))
    git("commit", "-am", "raised")
    code, said = check()
    assert code == 1 and "verl_sync_plugin.lines is 2, and a commit had lowered it to 1; lower it again" in said
