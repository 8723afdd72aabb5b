# SPDX-License-Identifier: Apache-2.0
"""The trainer's own weight stream in buckets, for models whose conversions compute.

The stream gathers and converts tensor by tensor, with collectives of its own. A rank that fails between two of them
would leave the others in one until the process group times out, which ends the run. So before each of them its ranks
meet in torch's store (``Guard``): who waits there goes on, hears of a failure, or gives up in time. No collective has
begun then, and the groups stay as good as they were.

Device memory beyond the two buckets: the tensors of one bucket, and what the stream itself needs for one tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from verl_sync_plugin.layout.tensors import Base, Shard, View
from verl_sync_plugin.trainers.base import ParameterSource, WeightStream, WirePolicy, dtype_name
from verl_sync_plugin.transport.agreement import Agreement

# What Megatron-Bridge calls, and what its like may; each takes its group by name or as None for all ranks
_COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "broadcast", "broadcast_object_list"),
    *("scatter", "gather_object", "barrier"),
)
_LOOK_SECONDS = 0.5  # between two looks whether a rank has failed


class Guard:
    """Watches over the foreign collectives of one rank, each of which waits for at most ``seconds``. All ranks begin
    the same runs in the same order."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._run = ""  # a name that is the same on all ranks and used once
        self._counts: dict[str, int] = {}  # collectives of this run, by group
        self._last: dict[str, str] = {}  # key of the last meeting, by group

    @contextmanager
    def watching(self, run: str = "") -> Iterator[None]:
        """Collectives that this thread calls inside by their names in ``torch.distributed`` wait for all their ranks.
        ``run`` begins a new run; without it the last one goes on. Raises RuntimeError with the error of a rank that
        failed in the run, and TimeoutError where one did not come."""
        thread = threading.get_ident()
        if run:
            self._run, self._counts = f"verl_sync_plugin/guard/{run}", {}

        def met(collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread:
                    groups = (value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup))
                    self._meet(collective.__name__, next(groups, dist.group.WORLD))
                return collective(*args, **kwargs)

            return call

        stock = {name: getattr(dist, name) for name in _COLLECTIVES}
        try:
            for name, collective in stock.items():
                setattr(dist, name, met(collective))
            yield
        except Exception as error:
            if dist.is_initialized() and dist.get_world_size() > 1:
                said = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
                _get_default_store().compare_set(f"{self._run}/failed", "", said)  # the first one tells the cause
            raise
        finally:
            for name, collective in stock.items():
                setattr(dist, name, collective)

    def _meet(self, collective: str, group: Any) -> None:
        size = dist.get_world_size(group)
        if size < 2:  # -1: this rank is no member
            return
        # By its ranks: these are the same on all of them, whatever groups each has made before
        store, ranks = _get_default_store(), dist.get_process_group_ranks(group)
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        key = f"{self._run}/{name}/{count} {collective}"
        if store.add(f"{key}/came", 1) == size:
            store.set(key, "all")
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                store.wait([key], timedelta(seconds=_LOOK_SECONDS))
                break
            except RuntimeError as error:
                if store.check([f"{self._run}/failed"]):
                    raise RuntimeError(f"another rank failed, {store.get(f'{self._run}/failed').decode()}") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"not all of ranks {ranks} reached {collective} (collective {count}) within {self._seconds:g} s"
                    ) from error
        if dist.get_rank(group) == 0 and name in self._last:  # everyone has left the meeting before this one
            store.delete_key(f"{self._last[name]}/came")
            store.delete_key(self._last[name])
        self._last[name] = key


class StreamSource(ParameterSource):
    """Runs the stream once to learn names, shapes and dtypes, then once per sync. Every rank has all tensors.
    ``open_stream`` starts it, and yields full HF tensors in the same order on every rank and every time. Its argument
    is True the first time and after a run that broke off: then it uses nothing of an earlier run."""

    def __init__(self, open_stream: Callable[[bool], WeightStream], policy: WirePolicy, timeout_seconds: float) -> None:
        self._open = open_stream
        self._policy = policy
        self._guard = Guard(timeout_seconds)
        self._run_names: Iterator[str] = iter(())  # of this sync, the same on all ranks
        self._unfinished = False  # the last run of the stream did not come to its end
        self._bases: list[Base] = []  # empty until the stream is learnt
        # Of each tensor of the stream: name, shape, dtype, and its base (``None`` where it came before)
        self._known: list[tuple[str, torch.Size, torch.dtype, int | None]] = []
        self._stream: Iterator[tuple[str, torch.Tensor]] | None = None
        self._passed = 0
        self._held: dict[int, torch.Tensor] = {}

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """Has all ranks learn the stream if one has to, so that they go through it alike."""
        self._run_names = map(f"stream {agreement.new_name()}.{{}}".format, itertools.count(1))
        if agreement.any("looking at the trainer's stream", lambda: self._unfinished or not self._bases):
            self._bases, self._unfinished = [], False
        return self

    def shards(self) -> list[Shard]:
        """All bases. Collective the first time."""
        self.release()
        if not self._bases:
            self._learn()
        return [Shard(base, partial(self._held.__getitem__, index)) for index, base in enumerate(self._bases)]

    def release(self) -> None:
        """Ends a stream that is under way, with all the tensors it and this source hold."""
        if isinstance(self._stream, Generator):
            self._stream.close()
        self._stream, self._passed = None, 0
        self._held.clear()

    @contextmanager
    def _running(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The stream, begun or gone on with. The ranks that wait for this one hear of a failure inside."""
        with self._guard.watching(next(self._run_names) if self._stream is None else ""):
            if self._stream is None:
                self._unfinished = True
                self._stream = iter(self._open(not self._bases))
            yield self._stream

    def _learn(self) -> None:
        bases: dict[str, Base] = {}
        self._known = []
        with self._running() as stream:
            for name, tensor in stream:
                # Tied weights come under one name from the first and from the last pipeline stage
                self._known.append((name, tensor.shape, tensor.dtype, None if name in bases else len(bases)))
                if name not in bases:
                    wire = self._policy.of_parameter([name], tensor.dtype)
                    view = View(name, tuple(tensor.shape), 0, tensor.numel())
                    bases[name] = Base(name, dtype_name(wire), wire.itemsize, (tensor.numel(),), (view,))
        self.release()
        self._bases, self._unfinished = list(bases.values()), False

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Runs the stream up to the last of these bases, and keeps these. Raises ValueError where it has changed."""
        for index in [index for index in self._held if index < bases[0]]:
            del self._held[index]
        if self._held.keys() >= set(bases):
            return
        yield
        with self._running() as stream:
            # What came before comes last in a stream that is at its end
            while self._passed < len(self._known) and (
                self._known[self._passed][3] is None or not self._held.keys() >= set(bases)
            ):
                self._take(*next(stream, ("", torch.empty(0))))
        self._unfinished = self._passed < len(self._known)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        known, shape, dtype, place = self._known[self._passed]
        if (name, tensor.shape, tensor.dtype) != (known, shape, dtype):
            self._bases = []  # the next sync learns it again
            raise ValueError(
                f"the trainer's weight stream has changed: {known!r} {dtype} {tuple(shape)} is now "
                f"{name!r} {tensor.dtype} {tuple(tensor.shape)}; the next sync reads it again"
            )
        self._passed += 1
        if place is not None:
            self._held[place] = tensor.detach().reshape(-1)
