# SPDX-License-Identifier: Apache-2.0
"""Runs ``pause_modes.py`` in a pytest of its own: when its engine ends, SGLang ends all children of that process."""

import pytest

from fresh_process import passed


@pytest.mark.slow
def test_what_each_pause_mode_promises_of_requests_in_flight() -> None:
    assert "9 passed" in passed("contract/pause_modes.py")
