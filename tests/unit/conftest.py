# SPDX-License-Identifier: Apache-2.0
"""The two ways to copy, for tests that run with both."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy; the kernel in Triton's interpreter, see ``test_copies.test_kernel_in_the_interpreter``."""
    if request.param == "by_kernel":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("runs again in a process of its own")
        for module in ("copier", "packing"):
            monkeypatch.setattr(f"verl_sync_plugin.copies.{module}.kernel_works", lambda device: True)
