# SPDX-License-Identifier: Apache-2.0
"""A trainer rank that cannot judge what its engine rank holds leaves the others alone in no collective."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.proof import Proven
from verl_sync_plugin.verify.destination import DestinationCheck

NOTHING = torch.zeros(0, dtype=torch.int64)


def _rank(rank: int, port: int) -> None:
    """Entry of a spawned process: the second rank's engine tells of more than it has placed."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    agreement = Agreement(10.0)
    check, started = DestinationCheck(agreement), time.monotonic()
    with pytest.raises(SyncError, match="rank 1: ValueError: the engine hashed 1 parts of parameters, and told of 0"):
        check.compare(NOTHING, Proven(sums=b"\0" * 8 * rank, placed=()))
    with agreement.attempt():
        if rank:
            raise torch.OutOfMemoryError("while it rounded what it had packed")
    with pytest.raises(SyncError, match=r"rank 1: .*while it rounded what it had packed"):
        check.compare(NOTHING, Proven(sums=b"", placed=()))
    assert time.monotonic() - started < 10, "a rank was left alone"
    check.compare(NOTHING, Proven(sums=b"", placed=()))
    with agreement.attempt():
        if rank:
            raise MemoryError("while it looked for what is made on the way")
    plan = SimpleNamespace(digest="plan", buckets=[])
    with pytest.raises(SyncError, match=r"rank 1: MemoryError: while it looked"):
        check.learn(plan, None)  # type: ignore[arg-type]
    with agreement.attempt():
        raise ValueError("nobody is told of this one")
    agreement.forget()  # the sync has failed by something else
    agreement.settle("the next sync")
    dist.barrier()  # the first rank keeps the store
    dist.destroy_process_group()


def test_a_rank_that_fails_to_compare_fails_all_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port,), nprocs=2)
