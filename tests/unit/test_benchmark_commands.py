# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' commands are where the documents and the visit's script type them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TYPED = (ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "gpu_visit.sh")
# the script puts their names in a variable
HARNESSES = {"phase", "training", "memory", "rollouts", "transfer", "apart", "pauses", "soak"}


def commands() -> set[str]:
    found = {name for file in TYPED for name in re.findall(r"-m \"?benchmarks\.(\w+(?:\.\w+)?)", file.read_text())}
    assert found >= {*HARNESSES, "models", "table", "plot", "report"}, found
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_typed_command_can_be_run(name: str) -> None:
    spec = find_spec(f"benchmarks.{name}")
    assert spec is not None
    if spec.submodule_search_locations is not None:
        assert find_spec(f"benchmarks.{name}.__main__") is not None, "a folder is run by its __main__"
