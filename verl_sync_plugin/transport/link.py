# SPDX-License-Identifier: Apache-2.0
"""Bytes from one rank to another over the network: NCCL's or gloo's sends and receives, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

Part = tuple[torch.Tensor, int]  # memory, and the rank that it goes to or comes from


class Link(Protocol):
    """Ranks that send each other bytes."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], device: torch.device) -> list[dist.Work]:
        """Starts transfers; all ranks of the link call it at the same time, also those with nothing to send or receive.

        Between two ranks there is at most one transfer in each direction. On a GPU a transfer starts behind what the
        current stream holds by now; that stream does not wait for it.
        """


class GroupLink:
    """A process group; peers are global ranks.

    Args:
        group: of which this process is a member.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._met = False

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], device: torch.device) -> list[dist.Work]:
        """See ``Link``."""
        if device.type == "cuda" and not self._met:  # NCCL wants all members in the first call of a group
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            self._met = True
        todo = [dist.P2POp(dist.isend, memory, peer, self._group) for memory, peer in sends]
        todo += [dist.P2POp(dist.irecv, memory, peer, self._group) for memory, peer in receives]
        return dist.batch_isend_irecv(todo) if todo else []


class Arrival:
    """Transfers that were started, asked as an event is.

    Args:
        works: one for each, or for several.
        timeout_seconds: how long ``query`` may wait on a CPU.
        device: where their memory is.
    """

    def __init__(self, works: Sequence[dist.Work], timeout_seconds: float, device: torch.device) -> None:
        self._works = list(works)
        self._bound = timedelta(seconds=timeout_seconds)
        self._cuda = device.type == "cuda"

    def query(self) -> bool:
        """Whether all are done; on a CPU they are when it returns, for gloo's end only while somebody waits for them.

        Raises:
            RuntimeError: a peer did not take part.
        """
        if self._cuda and not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:  # on a GPU it does not wait, but lets go of the memory
            if self._cuda:
                work.wait()
            else:
                work.wait(self._bound)
        return True
