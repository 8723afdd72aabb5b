# SPDX-License-Identifier: Apache-2.0
"""Collectives of foreign code, entered only when every rank of their group is there.

A bridge's export runs collectives of its own, one per tensor and more. A rank that fails between them would leave the
others in one until the process group times out, which ends the run. So before each of them its ranks meet in torch's
store: who failed says so there, and who waits goes on, hears of the failure, or gives up in time. No collective has
begun then, and the groups stay as good as they were.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# What Megatron-Bridge calls, and what its like may; each takes its group by name or as None for all ranks
_COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "broadcast", "broadcast_object_list"),
    *("scatter", "gather_object", "barrier"),
)
_LOOK_SECONDS = 0.5  # between two looks whether a rank has failed


class Guard:
    """Watches over the foreign collectives of one rank. All ranks begin the same runs in the same order.

    Args:
        seconds: bound on waiting for the other ranks of one collective.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._run = ""
        self._counts: dict[str, int] = {}  # collectives of this run, by group
        self._last: dict[str, str] = {}  # key of the last meeting, by group

    def begin(self, run: str) -> None:
        """A new run; what was left of the last one is over.

        Args:
            run: its name, the same on all ranks and used once in the life of the process group.
        """
        self._run, self._counts = f"verl_sync_plugin/guard/{run}", {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collectives that this thread calls inside by their names in ``torch.distributed`` are met before.

        Raises:
            RuntimeError: a rank failed in its part of the run; the text is its error.
            TimeoutError: a rank did not come to a collective in time.
        """
        thread = threading.get_ident()

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
                _store().compare_set(self._failed, "", said)  # the first one tells the cause
            raise
        finally:
            for name, collective in stock.items():
                setattr(dist, name, collective)

    @property
    def _failed(self) -> str:
        return f"{self._run}/failed"

    def _meet(self, collective: str, group: Any) -> None:
        size = dist.get_world_size(group)
        if size < 2:  # -1: this rank is no member
            return
        # By its ranks: these are the same on all of them, whatever groups each has made before
        store, ranks = _store(), dist.get_process_group_ranks(group)
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        key = f"{self._run}/{name}/{count} {collective}"
        if store.add(f"{key}/came", 1) == size:
            store.set(key, "all")
        self._wait(store, key, f"{collective} {count} of ranks {ranks}")
        if dist.get_rank(group) == 0 and name in self._last:  # everyone has left the meeting before this one
            store.delete_key(f"{self._last[name]}/came")
            store.delete_key(self._last[name])
        self._last[name] = key

    def _wait(self, store: Any, key: str, what: str) -> None:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                store.wait([key], timedelta(seconds=_LOOK_SECONDS))
                return
            except RuntimeError as error:
                if store.check([self._failed]):
                    raise RuntimeError(f"another rank failed, {store.get(self._failed).decode()}") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all ranks came to {what} within {self._seconds:g} s") from error


def _store() -> Any:
    return distributed_c10d._get_default_store()
