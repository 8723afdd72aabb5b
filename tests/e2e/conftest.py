# SPDX-License-Identifier: Apache-2.0
"""Shared by the end-to-end tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from e2e.runs import DUMMY, ROLLOUT, SMALL_BUCKETS, Play, Run, Setup, main_ppo


@pytest.fixture
def play(tiny_model: Callable[[str], str], tmp_path: Path) -> Play:
    """Runs ``main_ppo`` with a tiny model; ``more`` are fields of ``Setup``."""

    def run(*overrides: str, kind: str = "qwen2", **more: Any) -> Run:
        return main_ppo(Setup((DUMMY, SMALL_BUCKETS, *overrides), model=Path(tiny_model(kind)), **more), tmp_path)

    return run


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model with matrices larger than the smallest bucket, and with odd rows, which two ranks cut unevenly."""
    larger = {"intermediate_size": 8224, "vocab_size": 331}
    return tiny_models.write("qwen2", tmp_path_factory.mktemp("models") / "larger", **larger)


@pytest.fixture(scope="session")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs three steps of the quickstart's model; before the fourth is judged, the trainer's weights change."""
    guarded = f"{ROLLOUT}.custom.sync.max_probs_diff=0.001"
    path = (str(Path(__file__).parent / "counting"),)
    setup = Setup((guarded,), ranks=2, replicas=2, steps=4, change="drifting_trainer", path=path)
    return main_ppo(setup, tmp_path_factory.mktemp("drifted"))
