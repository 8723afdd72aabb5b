# SPDX-License-Identifier: Apache-2.0
"""Covers LoRA with separate engines: merged on the way, or served, where the base travels once to each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bare_engine.trainer import PROMPT, Words, far
from separate.driver import Driver, Member, failed_alike, members, none_failed, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Of log-probabilities in bfloat16: the engine adds the adapter's share to a layer's output, transformers to its weight
BOUND = 0.1


def serves(driver: Driver, rollout: Member, folder: Path) -> Words:
    """The engine answers as the trainer's base and adapter together do; returns what it says."""
    together(driver.trainers, "save", folder)
    words: Words = rollout.ask("generate").answer()
    assert far(words, folder) < BOUND
    return words


def adapter_alone(reports: list[dict[str, Any]], factors: int) -> None:
    for report in reports:
        assert report["tensors"] == factors and report["buckets"] == 0 < report["nbytes"], report
        assert {"plan", "gather"} & set(report["stages"]) or report["manager"] == "SeparateRollout"
        assert "deliver_adapter" in report["stages"] and report["delivery"] == "", report


@pytest.mark.extended
def test_the_base_travels_once_and_then_the_adapter(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    kinds = "processes.LoRATrainer", "rollouts.ServingRollout"
    with members(tiny_model("qwen2"), 2, *kinds) as (driver, (first, second)):
        together(driver.trainers, "train", 1)
        report = driver.sync(1, [first])[2]
        assert report["manager"] == "SeparateRollout" and report["buckets"] > 2 and report["coverage_missing"] == 0
        words = serves(driver, first, tmp_path / "v1")
        base = first.ask("sglang.generate", PROMPT, 4).answer()
        assert far(base, tmp_path / "v1") > 2 * BOUND, "the adapter changes little"
        # equal weights: the same words, of the adapter alone
        said = driver.sync(2, [first])
        factors = said[2]["tensors"]
        assert factors > 10
        adapter_alone([said[0], said[2]], factors)
        assert said[2]["global_steps"] == 2
        assert serves(driver, first, tmp_path / "v2") == words
        # after a step: others
        together(driver.trainers, "train", 3)
        said = driver.sync(3, [first])
        adapter_alone([said[0], said[2]], factors)
        assert serves(driver, first, tmp_path / "v3") != words
        # one that joins gets the base as well
        joined = driver.sync(4, [first, second])[3]
        assert joined["buckets"] > 2 and joined["tensors"] == report["tensors"], joined
        assert serves(driver, first, tmp_path / "v4a") == serves(driver, second, tmp_path / "v4b")
        fail_and_recover(driver, first, second, factors)
        for number, rollout in enumerate((first, second)):
            serves(driver, rollout, tmp_path / f"v6-{number}")


def fail_and_recover(driver: Driver, first: Member, second: Member, factors: int) -> None:
    """A trainer rank or an engine fails: the same error for all; the next sync works, of the adapter alone."""
    together(driver.trainers, "train", 5)
    for who, how, text in (
        (driver.trainers[1], "engine._manager._adapter.gather", "MemoryError: injected: gather"),
        (second, "sglang.load_adapter", "MemoryError: injected: load_adapter"),
    ):
        before = len(first.ask("sglang.abandoned.copy").answer())
        assert who.ask("break_next", how).answer() is None
        failed_alike(driver.sync(5, [first, second]), text)
        assert len(first.ask("sglang.abandoned.copy").answer()) > before
    adapter_alone(driver.sync(6, [first, second])[2:], factors)


def test_a_merged_adapter_reaches_the_engine(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    """Staged in every sync, for it is made on the way."""
    model, words = tiny_model("qwen2"), list[Words]()
    with members(model, 1, "processes.MergedLoRATrainer", tp=2) as (driver, ranks):
        together(driver.trainers, "share", tmp_path)
        for version in (1, 2, 3):
            together(driver.trainers, "train", version)
            reports = none_failed(driver.sync(version, ranks))[2:]
            for report in reports:
                assert report["delivery"] == "staged" and report["global_steps"] == version, report
                assert report["replayed_tensors"] == report["tensors"] and report["coverage_missing"] == 0, report
            words.append(serves(driver, ranks[0], tmp_path / str(version)))
            assert far(words[-1], Path(model)) > 2 * BOUND, "the adapter changes little"
            assert words.count(words[-1]) == 1, "the engine says what it said after the sync before"
        # the engine generates until it is asked, so not while the trainer plans
        assert ranks[0].ask("planned.copy").answer() == [True] * 3
