# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: the CPU stack, tiny models."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# before verl or SGLang is imported anywhere, also in spawned processes
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each SGLang rank would start a C++ compiler for a function of the vocabulary; nothing of the plugin is compiled
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Spawned ranks and SGLang's schedulers import packages of this folder by name
TESTS = str(Path(__file__).resolve().parent)
sys.path.insert(0, TESTS)
# The root comes last: it holds "benchmarks", and before site-packages it would shadow the installed package
sys.path.append(str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Groups tests for ``--dist loadgroup``: a module's, and runs of verl's mains, which look for Ray's processes."""
    item.add_marker(pytest.mark.xdist_group("e2e" if _of_a_main(item) else item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group goes first."""
    items.sort(key=lambda item: not _of_a_main(item))


def _of_a_main(item: pytest.Item) -> bool:
    return item.path.parent.name == "e2e" and item.path.stem != "test_prove"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Makes (once) and names a tiny random checkpoint with tokenizer of a given kind."""
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        # Not at the top: it imports torch, for which the environment and the path above must be set
        from tiny_models import write

        if kind not in made:
            made[kind] = str(write(kind, tmp_path_factory.mktemp("models") / kind))
        return made[kind]

    return make
