# SPDX-License-Identifier: Apache-2.0
"""Rollouts for scripts that ``torchrun`` starts on every rank, without verl's trainer, Ray or Hydra (``docs/spmd.md``).

from verl_sync_plugin import SpmdRollout

rollout    what the script calls
groups     which ranks share an engine
prompts    token ids into the engine, padded tensors out of it
manager    the phase of ``sync/`` with the script's model in the place of verl's training engine
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"SpmdRollout": "rollout", "Generated": "prompts"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
