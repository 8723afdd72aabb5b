# SPDX-License-Identifier: Apache-2.0
"""Other releases of packages, in folders that go before the installed ones in ``PYTHONPATH``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def folder_with(factory: pytest.TempPathFactory, *packages: str) -> Path:
    """A folder with these packages, without what they require. ``SYNC_TEST_PACKAGES`` names a place that keeps such
    folders between sessions."""
    kept = os.environ.get("SYNC_TEST_PACKAGES")
    folder = (Path(kept) if kept else factory.mktemp("packages")) / "+".join(packages)
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder
