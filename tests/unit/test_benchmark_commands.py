# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' commands are where the documents and the visit's script type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command
from benchmarks.apart import measure as apart
from benchmarks.memory import measure as memory
from benchmarks.pauses import measure as pauses
from benchmarks.phase import options
from benchmarks.rollouts import measure as rollouts
from benchmarks.soak import measure as soak
from benchmarks.training import measure as training
from benchmarks.transfer import measure as transfer

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


@pytest.mark.parametrize(
    ("harness", "arguments", "given"),
    [
        (
            "phase",
            options.arguments,
            "--case c --model-size tiny --override a=[1,2] --override b=1 --plugin-override c=2",
        ),
        ("training", training.arguments, "--case c --steps 9 --greedy --beside"),
        ("memory", memory.arguments, "--case c --model-size 7b --shares 0.9,0.8 --override a=1 --budget 100"),
        ("rollouts", rollouts.arguments, "--case c --model dense-1p8b --variants plugin --prompt-tokens 8"),
        ("transfer", transfer.arguments, "--case c --model dense-7b --buckets 1,2 --profile somewhere/else"),
        ("apart", apart.arguments, "--case c --model 7b --trainer fsdp2 --variants plugin,stock"),
        ("pauses", pauses.arguments, "--case c --model 7b --ways stock,retract"),
        ("soak", soak.arguments, "--model small --trainer separate-fsdp2 --syncs 96"),
    ],
)
def test_the_command_of_a_result_measures_the_same_again(
    harness: str, arguments: Callable[[list[str]], Any], given: str
) -> None:
    args = arguments([*given.split(), "--work", "somewhere", "--out", "there.json"])
    text = command.command_line(harness, args)
    assert text.startswith(f"python -m benchmarks.{harness} --case ")
    assert "somewhere" not in text and "there.json" not in text
    again = vars(arguments([*shlex.split(text)[3:], "--out", "x"]))
    assert {name: again[name] for name in again.keys() - command.LOCAL} == {
        name: value for name, value in vars(args).items() if name not in command.LOCAL
    }


def test_every_harness_keeps_its_command_so() -> None:
    folder = ROOT / "benchmarks"
    found = {file.parent.name for file in folder.glob("*/*.py") if "command_line(" in file.read_text()}
    assert found == {*HARNESSES, "report"}
