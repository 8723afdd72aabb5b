# SPDX-License-Identifier: Apache-2.0
"""How ranks make the group by which bytes go on GPUs; on GPUs: ``tests/separate/test_joint_on_gpu.py``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from verl_sync_plugin.transport.joint import BLOCKING_WAIT, _nccl, bounded


class Nccl:
    """In place of torch's class, which a build for CPUs lacks; the tests in ``tests/separate`` use that on GPUs."""

    Options = SimpleNamespace

    def __init__(self, *_: Any) -> None:
        self.blocking = os.environ[BLOCKING_WAIT]


class Broken(Nccl):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("injected: no GPU")


@pytest.mark.parametrize("before", [None, "0"])
def test_the_group_alone_waits_on_the_host(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    with mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True):
        assert _nccl(dist.HashStore(), 0, 1, 20.0).blocking == "1"
    with mock.patch.object(dist, "ProcessGroupNCCL", Broken, create=True), pytest.raises(RuntimeError, match="no GPU"):
        _nccl(dist.HashStore(), 0, 1, 20.0)
    assert os.environ.get(BLOCKING_WAIT) == before


GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done on a device here."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def test_a_call_that_does_not_end_is_left_alone_and_cleared_up() -> None:
    goes_on, cleared = threading.Event(), threading.Event()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"NCCL did not connect this rank with the others within .*=0\.2;"):
        bounded(lambda: goes_on.wait(30) and None, GPU, 0.2, late=cleared.set)
    assert time.monotonic() - started < 5 and not cleared.is_set()
    goes_on.set()
    assert cleared.wait(10), "what the late call has made is ended"


def test_its_errors_are_raised() -> None:
    def refused() -> None:
        raise ConnectionRefusedError("injected")

    cleared = threading.Event()
    with pytest.raises(ConnectionRefusedError, match="injected"):
        bounded(refused, GPU, 5.0, late=cleared.set)
    assert not cleared.is_set()
