# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests that leave a part of the engine as it was before the rest. They run in the scheduler."""

from __future__ import annotations

from typing import Any

import torch

MOVE = "bare_engine.stale_loader.move"
DERIVE_NOTHING = "bare_engine.stale_loader.derive_nothing"
_left: list[torch.Tensor] = []  # memory that captured graphs go on reading, so it must not be freed


def move(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """A parameter gets other memory, and there the other sign; its name is the only pair's. What was captured before
    reads the old memory."""
    parameter = dict(model.named_parameters())[named_tensors[0][0]]
    _left.append(parameter.data)
    parameter.data = -parameter.data


def derive_nothing(model: torch.nn.Module, named_tensors: list[tuple[Any, torch.Tensor]]) -> None:
    """All parameters of a name change their sign, and what the model has derived from them stays."""
    for name, parameter in model.named_parameters():
        if name.endswith(named_tensors[0][0]):
            parameter.data.neg_()
