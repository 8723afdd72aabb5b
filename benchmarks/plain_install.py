# SPDX-License-Identifier: Apache-2.0
"""Installs the package from its ``setup.py`` where setuptools is missing: copies it and writes its metadata.

``python plain_install.py SOURCE TARGET``; package data is whatever lies in the package's folders.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any


def setup_arguments(source: Path) -> dict[str, Any]:
    """The keyword arguments that ``setup.py`` gives to ``setup``, caught by a stand-in for setuptools."""
    caught: dict[str, Any] = {}
    stand_in = types.ModuleType("setuptools")
    vars(stand_in).update(setup=caught.update, find_packages=lambda *_, **__: [])
    sys.modules["setuptools"] = stand_in
    os.chdir(source)
    script = source / "setup.py"
    exec(
        compile(script.read_text(encoding="utf-8"), str(script), "exec"),
        {"__name__": "__main__", "__file__": str(script)},
    )
    return caught


def write_metadata(values: dict[str, Any], target: Path) -> Path:
    """Writes the ``.dist-info`` folder that entry points and versions are read from."""
    folder = target / f"{values['name'].replace('-', '_')}-{values['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {values['name']}\nVersion: {values['version']}\n", encoding="utf-8"
    )
    lines: list[str] = []
    for group, entries in values.get("entry_points", {}).items():
        lines += [f"[{group}]", *entries, ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def main() -> None:
    """Copies the package and writes its metadata."""
    source, target = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    values = setup_arguments(source)
    package = values["name"].replace("-", "_")
    shutil.copytree(source / package, target / package, dirs_exist_ok=True)
    print(f"installed {package} without setuptools: {write_metadata(values, target)}")


if __name__ == "__main__":
    main()
