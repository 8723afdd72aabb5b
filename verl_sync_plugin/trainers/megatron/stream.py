# SPDX-License-Identifier: Apache-2.0
"""The trainer's own weight stream in buckets, for models whose conversions compute.

The stream gathers and converts tensor by tensor, with its own collectives; what it saves is everything behind it: one
wire dtype, byte buckets, one load per bucket. Every rank has all tensors, so nothing else is gathered.

Device memory beyond the two buckets: the tensors of one bucket, and what the stream itself needs for one tensor.

A rank that fails inside the stream is everybody's error: see ``guard.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from verl_sync_plugin.layout.shard import Shard
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.trainers.base import ParameterSource, dtype_name
from verl_sync_plugin.trainers.megatron.guard import Guard
from verl_sync_plugin.trainers.wire import WirePolicy
from verl_sync_plugin.transport.agreement import Agreement

Stream = Iterable[tuple[Any, ...]]  # (HF name, full tensor, ...)


class StreamSource(ParameterSource):
    """The parameter source of a weight stream: runs it once to learn names, shapes and dtypes, then once per sync.

    Args:
        open_stream: starts the stream; yields full HF tensors in the same order on every rank and every time. Told
            whether the one before was broken off, so that nothing which ranks have exchanged in part is used again.
        policy: wire dtypes.
        timeout_seconds: bound on waiting for other ranks.
    """

    makes_all = True

    def __init__(self, open_stream: Callable[[bool], Stream], policy: WirePolicy, timeout_seconds: float) -> None:
        super().__init__()
        self._open = open_stream
        self._policy = policy
        self._guard = Guard(timeout_seconds)
        self._sync, self._runs = "", 0  # name of the sync, and runs of the stream in it; the same on all ranks
        self._syncs = 0
        self._unfinished = False  # the last run of the stream did not come to its end
        self._afresh = True
        self._bases: list[Base] = []
        self._order: list[int | None] = []  # base of each tensor of the stream; a second time is None
        self._known: list[tuple[str, torch.Size, torch.dtype]] = []
        self._stream: Iterator[tuple[Any, ...]] | None = None
        self._passed = 0
        self._held: dict[int, torch.Tensor] = {}

    def agree_on_layout(self, agreement: Agreement) -> ParameterSource:
        """See ``ParameterSource``: whatever one rank lacks, all make anew, so that they go through the stream alike."""
        self._syncs += 1
        self._sync, self._runs = f"stream {agreement.number}.{self._syncs}", 0
        if agreement.any("looking at the trainer's stream", lambda: self._unfinished or not self._bases):
            self._bases, self._unfinished, self._afresh = [], False, True
        return self

    def shards(self) -> list[Shard]:
        """All bases. Collective the first time."""
        self.release()
        if not self._bases:
            self._learn()
        return [Shard(base, partial(self._held_now, index)) for index, base in enumerate(self._bases)]

    def release(self) -> None:
        """Ends a stream that is under way, with all the tensors it and this source hold."""
        if isinstance(self._stream, Generator):
            self._stream.close()
        self._stream, self._passed, self._held = None, 0, {}

    @contextmanager
    def _running(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        """The stream, begun or gone on with. A failure inside is told to the ranks that wait for this one."""
        if self._stream is None:
            self._runs += 1
            self._guard.begin(f"{self._sync}.{self._runs}")
            self._unfinished = True
        with self._guard.watching():
            if self._stream is None:
                afresh, self._afresh = self._afresh, False
                self._stream = iter(self._open(afresh))
            yield self._stream

    def _learn(self) -> None:
        places: dict[str, int] = {}
        bases: list[Base] = []
        self._order, self._known = [], []
        with self._running() as stream:
            for name, tensor, *_ in stream:  # some releases of Megatron-Bridge add its own name
                self._known.append((name, tensor.shape, tensor.dtype))
                # Tied weights come under one name from the first and from the last pipeline stage
                self._order.append(None if name in places else len(bases))
                if name not in places:
                    places[name] = len(bases)
                    wire = self._policy.of_parameter([name], tensor.dtype)
                    view = View(name, tuple(tensor.shape), 0, tensor.numel())
                    bases.append(Base(name, dtype_name(wire), wire.itemsize, (tensor.numel(),), (view,)))
        self.release()
        self._bases, self._unfinished = bases, False

    def prepare(self, bases: tuple[int, ...], ahead: Sequence[tuple[int, ...]] = ()) -> Generator[None, None, None]:
        """Collective: runs the stream up to the last of these bases, and keeps these. Its collectives are its own.

        Raises:
            ValueError: the stream has changed since it was learnt.
            RuntimeError, TimeoutError: another rank failed, or did not come.
        """
        self._held = {index: tensor for index, tensor in self._held.items() if index >= bases[0]}
        if self._held.keys() >= set(bases):
            return
        yield
        with self._running() as stream:
            while self._passed < len(self._order) and not self._held.keys() >= set(bases):
                self._take(*next(stream, ("", torch.empty(0)))[:2])
        self._unfinished = self._passed < len(self._order)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        known = self._known[self._passed]
        if (name, tensor.shape, tensor.dtype) != known:
            self._bases = []  # the next sync learns it anew
            raise ValueError(
                f"the trainer's weight stream has changed: {known[0]!r} {known[2]} {tuple(known[1])} is now "
                f"{name!r} {tensor.dtype} {tuple(tensor.shape)}; the next sync takes it as it is then"
            )
        place = self._order[self._passed]
        self._passed += 1
        if place is not None:
            self._held[place] = tensor.detach().reshape(-1)

    def _held_now(self, index: int) -> torch.Tensor:
        return self._held[index]
