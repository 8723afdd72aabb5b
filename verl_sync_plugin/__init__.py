# SPDX-License-Identifier: Apache-2.0
"""verl-sync-plugin: takes over verl's resharding phase (trainer to rollout weight sync)."""

from contextlib import suppress
from typing import Any

__version__ = "0.1.0"


with suppress(Exception):  # plugin.py reports what is broken
    from verl_sync_plugin import compat

    compat.too_old()


def __getattr__(name: str) -> Any:
    # Every process of verl imports this package, and torch only where it needs it
    if name == "SpmdRollout":
        from verl_sync_plugin.spmd.rollout import SpmdRollout

        return SpmdRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
