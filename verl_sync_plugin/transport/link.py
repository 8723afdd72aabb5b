# SPDX-License-Identifier: Apache-2.0
"""Bytes from one rank to another over the network: NCCL's or gloo's sends and receives, many at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from verl_sync_plugin.transport.connecting import Connecting

Part = tuple[torch.Tensor, int]  # memory, and the rank that it goes to or comes from


class Link(Protocol):
    """Ranks that send each other bytes."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], device: torch.device) -> list[dist.Work]:
        """Starts transfers; all ranks of the link call it at the same time, also those with nothing to send or receive.

        Between two ranks there is at most one transfer in each direction. On a GPU a transfer starts behind what the
        current stream holds by now; that stream does not wait for it.

        Raises:
            RuntimeError: ranks were not connected within the bound.
        """


def links_of(sends: Sequence[Part], receives: Sequence[Part]) -> set[Hashable]:
    """The other ranks and the directions, each of which NCCL connects for itself."""
    return {(peer, True) for _, peer in sends} | {(peer, False) for _, peer in receives}


class GroupLink:
    """A process group; peers are global ranks.

    Args:
        group: of which this process is a member.
        connect_seconds: bound on NCCL's connecting of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, connect_seconds: float) -> None:
        self.group = group
        self._connecting = Connecting(connect_seconds)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], device: torch.device) -> list[dist.Work]:
        """See ``Link``."""
        self._connecting.call(lambda: self._meet(device), {"all"}, device)
        todo = [dist.P2POp(dist.isend, memory, peer, self.group) for memory, peer in sends]
        todo += [dist.P2POp(dist.irecv, memory, peer, self.group) for memory, peer in receives]
        if not todo:
            return []
        return self._connecting.call(lambda: dist.batch_isend_irecv(todo), links_of(sends, receives), device)

    def _meet(self, device: torch.device) -> None:
        """NCCL wants all members in the first call of a group."""
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)


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
