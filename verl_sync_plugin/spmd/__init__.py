# SPDX-License-Identifier: Apache-2.0
"""Engines for scripts that ``torchrun`` starts: ``from verl_sync_plugin import SpmdRollout``."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"SpmdRollout": "rollout", "Generated": "prompts"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
