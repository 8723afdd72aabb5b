# SPDX-License-Identifier: Apache-2.0
"""Where the kernel runs."""

import os

import pytest
import torch

IN_THE_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps only what needs the kernel in the process of ``test_copies.test_kernel_in_the_interpreter``."""
    if IN_THE_INTERPRETER:
        items[:] = [i for i in items if "device" in getattr(i, "fixturenames", ()) and "by_plain" not in i.name]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Names where the kernel runs: a GPU, or this process in Triton's interpreter; ``by_plain`` is a CPU without it."""
    if getattr(request, "param", "") == "by_plain":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda:0"
    if not IN_THE_INTERPRETER:
        pytest.skip("runs in a process of its own")
    monkeypatch.setattr("verl_sync_plugin.copies.copier.kernel_works", lambda device: True)
    return "cpu"
