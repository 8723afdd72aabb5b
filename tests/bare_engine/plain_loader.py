# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests that take whole tensors from the request, with what ours do before they write any. They run
in the scheduler."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from verl_sync_plugin.rollouts.sglang.prefixes import forget_prefixes, wait_for_forwards

FORWARD_SECONDS = 0.01  # at least: a tiny model would have answered before a test can interrupt it


def _slow_down(model: Any) -> None:
    """From the first load on every forward pass takes its time."""
    if hasattr(model.forward, "__wrapped__"):
        return
    honest = model.forward

    @functools.wraps(honest)
    def forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_SECONDS)
        return honest(*args, **kwargs)

    model.forward = forward


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Beside ``loader.load``."""
    _slow_down(model)
    wait_for_forwards(model)
    model.load_weights(named_tensors)


def load_and_forget_prefixes(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Beside ``loader.load_and_forget_prefixes``."""
    forget_prefixes()
    load(model, named_tensors)
