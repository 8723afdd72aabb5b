# SPDX-License-Identifier: Apache-2.0
"""The group by which bytes go on GPUs is made without torch's watchdog, whatever the process has set for its own."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from verl_sync_plugin.transport.joint import BLOCKING_WAIT, _nccl


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
