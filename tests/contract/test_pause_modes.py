# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of ``pause_modes.py``, which share an engine, in a pytest of their own.

Their engine lives in the process that asks it, so that requests can be in flight; and when it ends, SGLang ends all
children of that process, which other tests have as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).with_name("pause_modes.py"))


@pytest.mark.slow
def test_what_each_pause_mode_promises_of_requests_in_flight() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    folder = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0 and "16 passed" in run.stdout, run.stdout[-6000:] + run.stderr[-2000:]
