# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of ``pause_modes.py``, which share an engine, in a pytest of their own.

Their engine lives in the process that asks it, so that requests can be in flight; and when it ends, SGLang ends all
children of that process, which other tests have as well.
"""

import pytest

from fresh_process import passed


@pytest.mark.slow
def test_what_each_pause_mode_promises_of_requests_in_flight() -> None:
    assert "9 passed" in passed("contract/pause_modes.py")
