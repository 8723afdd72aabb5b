# SPDX-License-Identifier: Apache-2.0
"""Constants that a model's load leaves beside the weights, such as the padding of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl_sync_plugin.receiver.order import grounds
from verl_sync_plugin.receiver.recording import Recording

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differs(target: torch.Tensor, value: float) -> torch.Tensor:
    """Whether any element has other bits than a constant: bool of shape ``()``."""
    constant = torch.full((), value, dtype=target.dtype, device=target.device)
    as_bits = BITS[target.element_size()]
    return (target.view(as_bits) != constant.view(as_bits)).any()


def flags_of(flags: Iterable[torch.Tensor]) -> list[bool]:
    """Values of bool tensors of shape ``()``; waits for the device once."""
    found = list(flags)
    return torch.stack(found).tolist() if found else []


def kept_constants(recording: Recording) -> list[tuple[torch.Tensor, float]]:
    """The constants that a load leaves in place; others are a ground that it then writes on, perhaps with the same
    number."""
    covered = grounds([*recording.copies, *recording.others], recording.fills)
    found = [(fill.target, fill.value) for fill in recording.fills if fill.target.numel() and fill.order not in covered]
    return [each for each, gone in zip(found, flags_of(differs(t, v) for t, v in found), strict=True) if not gone]


def hold(constants: Iterable[tuple[torch.Tensor, float]]) -> bool:
    """Whether all constants are in place, whatever the sign of a zero; waits for the device once."""
    return not any(flags_of((target != value).any() for target, value in constants if target.numel()))
