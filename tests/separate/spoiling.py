# SPDX-License-Identifier: Apache-2.0
"""One bit flips in a sync whose trainer and engine are apart: all ranks raise the same, and the next sync is exact."""

from __future__ import annotations

from pathlib import Path

from separate.driver import Driver, Failure, Member, together
from separate.members import exact

READ, HELD = "changed on the way to the engine", "do not hold what was sent of"
VICTIM = "model.layers.1.mlp.down_proj.weight"


def found_by_all(driver: Driver, rollouts: list[Member], version: int, text: str) -> None:
    """The next sync fails on every rank with one text, which has this in it."""
    together(driver.trainers, "train", version)
    failed = driver.sync(version, rollouts)
    texts = {each.text for each in failed if isinstance(each, Failure)}
    assert len(texts) == 1 and len(failed) == len(driver.trainers) + len(rollouts), failed
    assert text in texts.pop(), failed


def a_flip_on_the_way_is_found(driver: Driver, rollouts: list[Member], version: int, folder: Path) -> None:
    """In what has come to a rollout rank, before the engine rank beside it reads that."""
    assert rollouts[0].ask("flip_arriving").answer() is None
    found_by_all(driver, rollouts, version, READ)
    _recovers(driver, rollouts, version + 1, folder)


def a_flip_in_the_engine_is_found(driver: Driver, rollouts: list[Member], version: int, folder: Path) -> None:
    """In a parameter, behind the copies; only a sync that is verified can find it."""
    assert rollouts[0].ask("spoil", VICTIM).answer() is None
    found_by_all(driver, rollouts, version, f"{HELD} model.layers.1.mlp.")
    _recovers(driver, rollouts, version + 1, folder)


def _recovers(driver: Driver, rollouts: list[Member], version: int, folder: Path) -> None:
    together(driver.trainers, "train", version)
    assert not any(isinstance(each, Failure) for each in driver.sync(version, rollouts))
    exact(driver, rollouts, folder / f"v{version}")
