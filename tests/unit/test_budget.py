# SPDX-License-Identifier: Apache-2.0
"""``.ci/budget.py``: the size of the project only goes down."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "budget.py"
NO_CODE = '"""Doc."""\n\nimport os\n# why\n\ndef f(\n    a,  # why\n):\n    """Two\n    lines."""\n'


def test_a_room_that_grows_and_a_ceiling_that_rises_are_named(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    def check(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, str(tmp_path / ".ci/budget.py"), *words], capture_output=True, text=True)
        return done.returncode, done.stderr

    for room in (".ci", "verl_sync_plugin"):
        (tmp_path / room).mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    product, ceilings = tmp_path / "verl_sync_plugin" / "a.py", tmp_path / ".ci" / "budget.toml"
    product.write_text(f'{NO_CODE}    return """a\nb"""\n')
    assert check("--lower") == (0, "") and check() == (0, "")
    assert "verl_sync_plugin = { files = 1, lines = 12, code = 5 }" in ceilings.read_text()
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    product.write_text(f"{product.read_text()}b = 2\n")
    code, said = check()
    assert code == 1 and "verl_sync_plugin: 13 lines, above 12, the ceiling in .ci/budget.toml" in said
    assert check("--lower") == (0, "") and check()[0] == 1, "--lower does not raise"
    ceilings.write_text(ceilings.read_text().replace("lines = 12", "lines = 13").replace("code = 5", "code = 6"))
    git("commit", "-am", "raised")
    code, said = check()
    assert code == 1 and "verl_sync_plugin.lines is 13, and a commit had lowered it to 12; lower it again" in said
