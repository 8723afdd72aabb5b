# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests that load nothing: one makes the engine slow, one has the next load of whole tensors stand
still with half of them written. They run in the scheduler."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch

STALL_SECONDS = 15.0  # at most
FORWARD_SECONDS = 0.004  # at least: a tiny model would have answered before a test can interrupt it


def slow_down(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """From now on every forward pass takes its time."""
    honest = model.forward

    @functools.wraps(honest)
    def forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(FORWARD_SECONDS)
        return honest(*args, **kwargs)

    model.forward = forward


def arm(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The next load says in a file "stalled" when it stands still, and goes on once there is a file "go".

    Both are in the folder that the only pair names.
    """
    folder, honest = Path(named_tensors[0][0]), model.load_weights

    def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
        del model.load_weights
        honest(weights[: len(weights) // 2])
        (folder / "stalled").touch()
        deadline = time.monotonic() + STALL_SECONDS
        while not (folder / "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody has let this load go on")
            time.sleep(0.005)
        honest(weights[len(weights) // 2 :])

    model.load_weights = load_weights
