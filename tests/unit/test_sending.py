# SPDX-License-Identifier: Apache-2.0
"""How a rank sends buckets, and ends that where another one has failed or died; on GPUs: ``tests/separate``."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from verl_sync_plugin.config.settings import SyncConfig
from verl_sync_plugin.errors import SyncError
from verl_sync_plugin.report import SyncReport
from verl_sync_plugin.sync.sender import BROADCASTS, SLOTS, BucketSender
from verl_sync_plugin.sync.ways import Reach, Staged
from verl_sync_plugin.transport.agreement import Agreement
from verl_sync_plugin.transport.joint import JointRanks, bounded

CPU, BOUND = torch.device("cpu"), 0.2


def broadcasting(agreement: Agreement, sender: BucketSender) -> Staged:
    way = Staged(SyncConfig(), agreement, sender, agreement, Reach(agreement))
    way._moves = True
    return way


def test_a_trainer_rank_awaits_its_last_broadcasts_with_a_bound() -> None:
    """Before it looks for NaN, for that waits for the device, which a broadcast to a dead rank keeps busy for ever."""
    agreement = Agreement(BOUND, ranks=JointRanks(dist.HashStore(), 0, 1, 0, BOUND, CPU))
    sender = BucketSender(CPU, BOUND)

    def begun(bucket: Any, slot: int, *_: Any) -> None:
        sender._events[slot] = SimpleNamespace(query=lambda: False)  # type: ignore[assignment]

    def waits_for_ever() -> list[int]:
        raise AssertionError("waits for the device without a bound")

    sender.broadcast, sender.broken = begun, waits_for_ever  # type: ignore[method-assign]
    buckets = [SimpleNamespace(stride=16, world=1)] * (SLOTS - 1)
    sync: Any = SimpleNamespace(plan=SimpleNamespace(buckets=buckets, sharded=True), report=SyncReport(), senders=(0,))
    with pytest.raises(
        SyncError, match=r"TimeoutError: the copies of a bucket did not complete within .*timeout_seconds=0\.2;"
    ):
        broadcasting(agreement, sender).run(sync)
        agreement.settle("committing")


def test_a_dead_rank_does_not_leave_hundreds_of_broadcasts_in_the_queue_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's queue would be full, and the host wait there without a bound. Works of gloo end while they are awaited, so
    these mirror NCCL's, which do not; nor has this machine so many ranks."""
    sender, memory, begun = BucketSender(CPU, BOUND), torch.zeros(1000 * 16, dtype=torch.uint8), list[int]()
    monkeypatch.setattr(sender, "_slot", lambda slot: memory)
    monkeypatch.setattr(sender, "_device", torch.device("cuda", 0))
    work = SimpleNamespace(is_completed=lambda: False)

    def broadcast(segment: torch.Tensor, root: int) -> Any:
        begun.append(root)
        return work

    bucket: Any = SimpleNamespace(stride=16, world=1000)
    with pytest.raises(TimeoutError, match=r"look for a rank that died or hangs"):
        sender.broadcast(bucket, 0, range(1000), broadcast)
    assert begun == list(range(BROADCASTS))
    work.is_completed, work.wait = (lambda: True), lambda: True
    begun.clear()
    sender.broadcast(bucket, 0, range(1000), broadcast)
    assert begun == list(range(1000)), "every rank sends its segment, in order"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Nothing is done on it here."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return torch.device("cuda", 0)


def test_connecting_that_does_not_end_is_left_alone_and_cleared_up(gpu: torch.device) -> None:
    goes_on, cleared = threading.Event(), threading.Event()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"NCCL did not connect this rank with the others within .*=0\.2;"):
        bounded(lambda: goes_on.wait(30) and None, gpu, 0.2, late=cleared.set)
    assert time.monotonic() - started < 5 and not cleared.is_set()
    goes_on.set()
    assert cleared.wait(10), "what the late call has made is ended"


def test_errors_of_connecting_are_raised(gpu: torch.device) -> None:
    def refused() -> None:
        raise ConnectionRefusedError("injected")

    cleared = threading.Event()
    with pytest.raises(ConnectionRefusedError, match="injected"):
        bounded(refused, gpu, 5.0, late=cleared.set)
    assert not cleared.is_set()
