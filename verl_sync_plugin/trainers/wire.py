# SPDX-License-Identifier: Apache-2.0
"""The dtypes in which parameters travel: the widest that an engine rank keeps, never wider than the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verl_sync_plugin.lora.peft import is_adapter

_NAMES = {"auto": "bfloat16", "half": "float16", "float": "float32"}


@dataclass
class WirePolicy:
    """One object for all sources of a trainer.

    Attributes:
        dtype: of floating-point parameters of which the engine has not said anything.
        kept: what it said, by HF name; empty for a tensor of which it wants whatever the trainer has.
    """

    dtype: torch.dtype
    kept: dict[str, str] = field(default_factory=dict)
    _asked: dict[tuple[str, ...], torch.dtype] = field(default_factory=dict)

    def of_parameter(self, names: Sequence[str], dtype: torch.dtype) -> torch.dtype:
        """The wire dtype of one storage, given the trainer's dtype and all names of it and of what it holds. Adapters
        are exchanged among trainers only and keep theirs."""
        self._asked[tuple(names)] = dtype
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        kept = {self.kept[name] for name in served if name in self.kept}
        if "" in kept:
            return dtype
        wanted: list[torch.dtype] = [found for name in kept if (found := getattr(torch, name)).is_floating_point]
        return min(max(wanted or [self.dtype], key=lambda each: each.itemsize), dtype, key=lambda each: each.itemsize)

    def learn(self, kept: Mapping[str, str]) -> bool:
        """Takes in what the engine keeps; returns whether anything that was asked for travels otherwise now."""
        before = {names: self.of_parameter(names, dtype) for names, dtype in list(self._asked.items())}
        self.kept |= kept
        return any(self.of_parameter(names, self._asked[names]) != wire for names, wire in before.items())


def wire_policy(rollout_dtype: str) -> WirePolicy:
    """The policy of a trainer at first.

    Args:
        rollout_dtype: ``rollout.dtype``, in which engines keep most parameters; ``auto`` is that of the checkpoint.

    Raises:
        ValueError: the name of a dtype is none of torch's.
    """
    dtype = getattr(torch, _NAMES.get(rollout_dtype, rollout_dtype), None)
    if not isinstance(dtype, torch.dtype):
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(f"{key}={rollout_dtype!r}: not a torch dtype. Set {key}=bfloat16.")
    return WirePolicy(dtype)
