# SPDX-License-Identifier: Apache-2.0
"""Engines for scripts that ``torchrun`` starts: ``from verl_sync_plugin import SpmdRollout``."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("SpmdRollout", "Generated"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl_sync_plugin.spmd import rollout  # torch only where it is needed

    return getattr(rollout, name)
