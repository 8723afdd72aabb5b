# SPDX-License-Identifier: Apache-2.0
"""The ranks of a sync exchange a few words here, and all go on or all raise the same error."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from verl_sync_plugin.errors import RankLostError, SyncError
from verl_sync_plugin.transport.protocol import agreement_seconds

SPIN_SECONDS = 0.005
T = TypeVar("T")


def poll_until(done: Callable[[], bool], seconds: float, late: str) -> None:
    """Waits for the device without holding it up, like ``synchronize`` but with a bound: a rank that died leaves NCCL
    hanging. Raises TimeoutError, which says ``late``."""
    started = time.monotonic()
    while not done():
        waited = time.monotonic() - started
        if waited > seconds:
            raise TimeoutError(late)
        if waited > SPIN_SECONDS:  # a sleep lasts some 70 us, a good part of a bucket's time
            time.sleep(2e-5)


def await_collective(work: dist.Work, device: torch.device, seconds: float) -> None:
    """Waits for a collective that was started with ``async_op=True``; raises RuntimeError where another rank did not
    take part in time. On a GPU this only orders streams; who waits for the result there has a bound."""
    if device.type == "cuda":
        work.wait()
    else:
        work.wait(timedelta(seconds=seconds))


class Ranks:
    """A group of processes that exchange words by gloo on the CPU; calls are collective, in the same order on all.

    Every call, that of the constructor too, raises RuntimeError when a member is dead, or silent for longer than the
    group's bound.

    Args:
        rank: this process's place.
        trainers: those that hold parameters of the trainer.
        rollouts: those paired with an engine rank.
        store: where they find each other, if there are several; used by these ranks alone.
        seconds: bound on every call.

    Attributes:
        size: how many there are.
        after_loss: for messages: what a user does once a member is lost.
    """

    after_loss: ClassVar[str] = "the run cannot sync any more, restart it"

    _kept: Any = None

    def __init__(
        self, rank: int, trainers: Sequence[int], rollouts: Sequence[int], store: Any = None, seconds: float = 0.0
    ) -> None:
        self.rank, self.trainers, self.rollouts = rank, tuple(trainers), tuple(rollouts)
        self.size, self._bound = len({*trainers, *rollouts}), timedelta(seconds=seconds)
        if self.size > 1:  # gloo takes 60 us for one rank, and a sync has a round per bucket
            self._kept = dist.ProcessGroupGloo(dist.PrefixStore("words", store), rank, self.size, self._bound)

    def _words(self) -> Any:
        if self._kept is None:
            raise RuntimeError("this rank has left the group")
        return self._kept

    def all_reduce(self, values: torch.Tensor) -> None:
        """Adds up int tensors of one shape, on the CPU, in place."""
        if self.size > 1:
            self._words().allreduce([values]).wait(self._bound)

    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), in rank order."""
        if self.size == 1:
            return [value]
        mine = _packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._words().allgather([sizes], [torch.tensor([mine.numel()])]).wait(self._bound)
        longest = int(max(size.item() for size in sizes))
        everywhere = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        self._words().allgather([everywhere], [padded]).wait(self._bound)
        return [_unpacked(each[: int(size.item())]) for each, size in zip(everywhere, sizes, strict=True)]

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value (picklable), on all ranks."""
        if self.size == 1:
            return value
        mine = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([mine.numel()])
        self._words().broadcast(size, 0).wait(self._bound)
        self._words().broadcast(mine.resize_(int(size.item())), 0).wait(self._bound)
        return value if self.rank == 0 else _unpacked(mine)

    def close(self) -> None:
        """Ends the group, whatever state its members are in; not collective. With the last reference to it its
        connections close, which is how members that wait for this one hear of it."""
        if self._kept is not None:
            self._kept.abort()
        self._kept = None


ALONE = Ranks(0, (), (0,))  # one process that waits for nobody


def trainer_world(seconds: float) -> Ranks:
    """All processes of the trainer, each of which is paired with an engine rank: trainer and rollout share their GPUs.
    Collective: makes a gloo group of its own, so that it neither waits for nor blocks the payload's group."""
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"verl-sync/{rank}", 1)  # of this group, on every rank
    return Ranks(rank, everyone, everyone, dist.PrefixStore(f"verl-sync/{number}", store), seconds)


class Agreement:
    """Exchanges status among the trainer's ranks, or among these and the rollout ranks.

    Every rank takes the same ``step``s: it does its work and hears whether all have done theirs. Where the ranks need
    not wait for each other yet, work runs inside ``attempt``, which keeps an error until the next ``settle`` instead
    of letting this rank leave the others alone in a collective.

    Attributes:
        ranks: who takes part.
        name: of this agreement; no other has it, on any host.
    """

    def __init__(self, timeout_seconds: float, ranks: Ranks | None = None) -> None:
        """Collective. ``timeout_seconds`` bounds one local wait between two points; ``ranks`` take part (all processes
        of the trainer when not given), and wait for each other as ``agreement_seconds`` says."""
        self._timeout_seconds = agreement_seconds(timeout_seconds)
        self._lost = ""
        self.ranks = ranks or trainer_world(self._timeout_seconds)
        self._error: Exception | None = None
        self._cancelled: asyncio.CancelledError | None = None
        self._names = itertools.count(1)
        self.name = self.broadcast_object("making the agreement", secrets.token_hex(8))

    def new_name(self) -> str:
        """A name that nothing else has; the same on all ranks, which call this alike."""
        return f"{self.name}.{next(self._names)}"

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keeps an exception raised inside for the next ``settle``; skips nothing by itself. A cancellation counts as
        one: this rank goes on to the next ``settle``, so that the others hear of it, and is cancelled there."""
        try:
            yield
        except asyncio.CancelledError as error:
            self._cancelled = error
            self._error = self._error or RuntimeError("this rank was cancelled")
        except Exception as error:
            self._error = self._error or error

    def step(self, what: str, work: Callable[[], T]) -> T:
        """Does ``work`` on every rank; when it returns what that returned here, every rank has done it. Collective. A
        rank that has failed before does not begin. Raises SyncError where any failed; ``what`` names the step in it."""
        done: list[T] = []
        if not self.failed:
            with self.attempt():
                done.append(work())
        self.settle(what)
        return done[0]

    def any(self, what: str, work: Callable[[], bool]) -> bool:
        """Like ``step``; True when ``work`` returned True on any rank."""
        found = False
        if not self.failed:
            with self.attempt():
                found = work()
        return self.settle(what, waiting=found)

    def run(self, what: str, work: Generator[None, None, T]) -> T | None:
        """Runs work that yields right before each of its collectives, and settles there; collective.

        So a rank that fails on its way to a collective leaves nobody alone in it. Settle once more after it, with the
        same ``what``: a rank that fails after the last collective says so while others are there already. A rank
        that has failed before does not begin, and gets ``None``. Work that another rank's failure ends is closed.
        """
        try:
            while not self.failed:
                with self.attempt():
                    try:
                        next(work)
                    except StopIteration as end:
                        return end.value
                self.settle(what)
            return None
        finally:
            work.close()

    @property
    def failed(self) -> bool:
        """True if this rank has an error that the others do not know of yet."""
        return self._error is not None

    def forget(self) -> None:
        """Drops a failure that was never settled, so that the next step does not report it."""
        self._error = self._cancelled = None

    def vote(self, what: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Like ``settle``, and adds up numbers of all ranks in the same round, as many on each, modulo 2^64."""
        cancelled, self._cancelled = self._cancelled, None
        try:
            return self._exchange(what, torch.as_tensor(values, dtype=torch.int64).flatten())
        except SyncError as error:
            if cancelled is not None:
                raise cancelled from error
            raise

    def settle(self, what: str, waiting: bool = False) -> bool:
        """Exchanges the status with all ranks; ``what`` is the stage, for the message. True when any rank is
        ``waiting``: it is not done with the stage and asks for another round.

        Raises:
            SyncError: any rank failed, or did not answer in time; the same text on every rank that answers.
            CancelledError: instead of it, on a rank that was cancelled.
        """
        return bool(self.vote(what, [int(waiting)]).item())

    def _exchange(self, what: str, values: torch.Tensor) -> torch.Tensor:
        mine, self._error = self._error, None
        if self._lost:
            raise RankLostError(self._lost)
        status = torch.cat([torch.tensor([int(mine is not None)]), values])
        with self._peers(what, mine):
            self.ranks.all_reduce(status)
        if status[0].item():
            raise SyncError(self._tell_all(what, mine)) from mine
        return status[1:]

    @contextmanager
    def _peers(self, what: str, mine: BaseException | None) -> Iterator[None]:
        """Turns the collective's complaint about a dead or silent peer into a SyncError."""
        try:
            yield
        except RuntimeError as error:
            # A gloo group does not survive a timeout or a dead member
            self._lost = (
                f"weight sync: a rank died or did not reach {what!r} within {self._timeout_seconds:g} s "
                f"(rank {self.ranks.rank} waited); {self.ranks.after_loss}. {error}"
            )
            raise RankLostError(self._lost) from (mine or error)

    def _tell_all(self, what: str, mine: BaseException | None) -> str:
        text = None if mine is None else "".join(traceback.format_exception_only(mine)).strip()
        with self._peers(what, mine):
            texts = self.ranks.gather(text)
        failures = "\n".join(f"rank {rank}: {said}" for rank, said in enumerate(texts) if said)
        return f"weight sync failed at {what!r}; trainer weights are unchanged.\n{failures}"

    def gather(self, what: str, value: T) -> list[T]:
        """Every rank's value (picklable), in rank order."""
        with self._peers(what, None):
            return self.ranks.gather(value)

    def broadcast_object(self, what: str, value: T) -> T:
        """Rank 0's value (picklable), on all ranks."""
        with self._peers(what, None):
            return self.ranks.broadcast_object(value)

    def same_on_all(self, what: str, value: str) -> None:
        """Raises SyncError on every rank when ``value`` differs between ranks, naming who holds what."""
        values = self.gather(what, value)
        if len(set(values)) > 1:
            held = "; ".join(f"rank {rank}: {held}" for rank, held in enumerate(values))
            raise SyncError(f"weight sync: the ranks disagree on {what}: {held}")


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
