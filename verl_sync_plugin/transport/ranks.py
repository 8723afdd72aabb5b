# SPDX-License-Identifier: Apache-2.0
"""The ranks that go through a sync together: how they exchange a few words, and who of them does what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks(ABC):
    """A group of processes with a collective of their own on the CPU; calls are collective, in the same order on all.

    Every call raises RuntimeError when a member is dead or silent for longer than the group's bound.

    Attributes:
        rank: this process's place.
        size: how many there are.
        trainers: those that hold parameters of the trainer.
        rollouts: those beside an engine rank.
        after_loss: what a user is told to do once a member is lost.
    """

    rank: int
    size: int
    trainers: tuple[int, ...]
    rollouts: tuple[int, ...]
    after_loss: ClassVar[str]

    @abstractmethod
    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces int tensors of one shape, on the CPU, in place."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), in rank order."""

    def share(self, value: T) -> T:
        """Rank 0's value (picklable), on all ranks."""
        return self.gather(value)[0]

    def close(self) -> None:  # noqa: B027  (a group of the whole process stays)
        """Ends what this group alone has, whatever state its members are in; not collective."""


class TrainerWorld(Ranks):
    """All processes of the trainer, each of which has an engine rank beside it: trainer and rollout share their GPUs.

    Collective: makes a gloo group of its own, so that it neither waits for nor blocks the payload's group.
    """

    after_loss = "the run cannot sync any more, restart it"

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.trainers = self.rollouts = tuple(range(self.size))
        timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self._group is not None:
            dist.all_reduce(values, op=op, group=self._group)

    def gather(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class Alone(Ranks):
    """One process that waits for nobody."""

    after_loss = ""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.trainers, self.rollouts = (), (0,)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        pass

    def gather(self, value: T) -> list[T]:
        return [value]
