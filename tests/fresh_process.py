# SPDX-License-Identifier: Apache-2.0
"""Code in a fresh interpreter, and another plugin of verl's for it to find."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def python(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter, away from the source tree."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def other_plugin(folder: Path, code: str) -> Path:
    """Installs another plugin of verl, which is found and loaded before ours."""
    site = folder / "site"
    metadata = site / "other_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nother = other_plugin\n")
    (site / "other_plugin.py").write_text(textwrap.dedent(code))
    return site
