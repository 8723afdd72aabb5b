# SPDX-License-Identifier: Apache-2.0
"""Calls in which NCCL connects ranks have a bound; on GPUs: ``tests/separate/test_joint_on_gpu.py``."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from verl_sync_plugin.transport.connecting import Connecting

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done on a device here."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def thread() -> str:
    return threading.current_thread().name


def test_only_calls_that_connect_have_a_thread_of_their_own() -> None:
    connecting, here = Connecting(5.0), thread()
    assert connecting.call(thread, {(1, True)}, GPU) == "verl-sync-connecting"
    assert connecting.call(thread, {(1, True)}, GPU) == here, "connected"
    assert connecting.call(thread, {(1, True), (1, False)}, GPU) == "verl-sync-connecting", "a new direction"
    assert connecting.call(thread, {(1, False)}, GPU) == here
    assert Connecting(5.0).call(thread, {(1, True)}, torch.device("cpu")) == here, "NCCL has no part in it"


def test_a_call_that_does_not_end_is_left_alone_and_cleared_up_behind() -> None:
    goes_on, cleared = threading.Event(), threading.Event()
    connecting = Connecting(0.2, late=cleared.set)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"NCCL did not connect this rank with the others within .*=0\.2;"):
        connecting.call(lambda: goes_on.wait(30), {"all"}, GPU)
    assert time.monotonic() - started < 5 and not cleared.is_set()
    goes_on.set()
    assert cleared.wait(10), "what the late call has made is ended"
    assert connecting.call(thread, {"all"}, GPU) == "verl-sync-connecting", "it has connected nobody"


def test_its_errors_are_raised() -> None:
    def refused() -> None:
        raise ConnectionRefusedError("injected")

    cleared = threading.Event()
    with pytest.raises(ConnectionRefusedError, match="injected"):
        Connecting(5.0, late=cleared.set).call(refused, {"all"}, GPU)
    assert not cleared.is_set()
