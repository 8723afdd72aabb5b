"""Shared by the end-to-end tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAKE_LARGER = Path(__file__).with_name("make_larger.py")


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tensors larger than 1 MiB."""
    folder = tmp_path_factory.mktemp("models") / "larger"
    subprocess.run([sys.executable, str(MAKE_LARGER), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vocabulary that two tensor-parallel ranks can share evenly, as Megatron insists."""
    folder = tmp_path_factory.mktemp("models") / "even"
    subprocess.run([sys.executable, str(MAKE_LARGER), str(folder), "332"], check=True, capture_output=True)
    return folder
