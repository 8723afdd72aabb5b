# SPDX-License-Identifier: Apache-2.0
"""Calls in which NCCL connects ranks have a bound; on GPUs: ``tests/separate/test_joint_on_gpu.py``."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from verl_sync_plugin.transport.joint import bounded

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
