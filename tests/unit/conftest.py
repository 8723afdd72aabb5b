# SPDX-License-Identifier: Apache-2.0
"""Where the kernel runs, and the two ways to copy."""

from __future__ import annotations

import os

import pytest
import torch


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the kernel run in Triton's interpreter, see ``test_copies.test_kernel_in_the_interpreter``."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs again in a process of its own")
    for module in ("copier", "packing"):
        monkeypatch.setattr(f"verl_sync_plugin.copies.{module}.kernel_works", lambda device: True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernel runs: on a GPU, or in this process if Triton's interpreter was asked for when it started."""
    if torch.cuda.is_available():
        return "cuda:0"
    interpret(monkeypatch)
    return "cpu"


@pytest.fixture
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy on a CPU."""
    if request.param == "by_kernel":
        interpret(monkeypatch)
