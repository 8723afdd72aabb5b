# SPDX-License-Identifier: Apache-2.0
"""A sync that does not compare what an engine rank has read, so that only the comparison of what it holds is left."""

from __future__ import annotations

from typing import Any
from unittest import mock

from verl_sync_plugin.verify import Comparison


def reads_unseen() -> Any:
    """A patch for the syncs within it."""
    honest = Comparison._unequal

    def unequal(comparison: Any, sent: Any, found: Any, times: Any) -> list[str]:
        return [] if times is comparison._read.times else honest(comparison, sent, found, times)

    return mock.patch.object(Comparison, "_unequal", unequal)
