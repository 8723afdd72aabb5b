# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a separate run, and compares what its engines hold with a checkpoint of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from ports import free_port
from separate.driver import Driver, Member, end, together
from separate.processes import Trainer
from separate.rollouts import Rollout


@contextmanager
def members(
    model: str,
    rollouts: int,
    trainer: type[Trainer] = Trainer,
    environment: AbstractContextManager[None] | None = None,
    rollout: type[Rollout] = Rollout,
    tp: int = 1,
    **sync: object,
) -> Iterator[tuple[Driver, list[Member]]]:
    """Two trainer ranks, started in an environment of their own, and all ranks of rollouts."""
    port = free_port()
    with environment or nullcontext():
        trainers = [Member(trainer, rank, 2, port, model, sync) for rank in range(2)]
    ports = [free_port() for _ in range(rollouts)]
    engines = [Member(rollout, port, model, sync, rank, tp) for port in ports for rank in range(tp)]
    try:
        assert [member.answer() for member in (*trainers, *engines)] == ["ready"] * (2 + rollouts * tp)
        yield Driver(trainers), engines
    finally:
        end([*engines, *trainers])


def exact(driver: Driver, rollouts: list[Member], folder: Path) -> None:
    """Every engine holds what SGLang loads from a checkpoint of the trainer."""
    folder.mkdir()
    together(driver.trainers, "save", folder / "checkpoint")
    for number, rollout in enumerate(rollouts):
        own = folder / str(number)
        own.mkdir()
        assert rollout.ask("differs", folder / "checkpoint", own).answer() == []
