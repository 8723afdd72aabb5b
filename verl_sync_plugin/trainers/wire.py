# SPDX-License-Identifier: Apache-2.0
"""The dtypes in which parameters travel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verl_sync_plugin.lora.peft import is_adapter

# Routers travel in the trainer's dtype
KEPT = (r"\.gate\.weight$", r"e_score_correction_bias$")
_SHORT = {"half": "float16", "float": "float32"}


@dataclass
class WirePolicy:
    """Which dtype a parameter travels in; one object for all sources of a trainer.

    Attributes:
        dtype: for floating-point parameters.
        keep: patterns of HF names whose parameters keep the trainer's dtype (routers and the like).
        wider: what the engine said it would take, by HF name.
    """

    dtype: torch.dtype
    keep: tuple[str, ...] = ()
    wider: dict[str, torch.dtype] = field(default_factory=dict)
    _asked: dict[tuple[str, ...], torch.dtype] = field(default_factory=dict)

    def of_parameter(self, names: Sequence[str], dtype: torch.dtype) -> torch.dtype:
        """The wire dtype of one storage, given the trainer's dtype and all names of it and of what it holds. Adapters
        are exchanged among trainers only and keep theirs."""
        self._asked[tuple(names)] = dtype
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        if any(re.search(p, name) for p in self.keep for name in served):
            return dtype
        widest = max((self.wider.get(name, self.dtype) for name in served), key=lambda each: each.itemsize)
        found = min(widest, dtype, key=lambda each: each.itemsize)
        return self.dtype if widest.itemsize <= self.dtype.itemsize or found.itemsize < self.dtype.itemsize else found

    def learn(self, wider: Mapping[str, torch.dtype]) -> bool:
        """Takes in what the engine would take; returns whether anything that was asked for travels otherwise now."""
        before = {names: self.of_parameter(names, dtype) for names, dtype in list(self._asked.items())}
        self.wider |= wider
        return any(self.of_parameter(names, self._asked[names]) != wire for names, wire in before.items())


def wire_policy(rollout_dtype: str) -> WirePolicy:
    """The wire dtype policy of a sync, from ``rollout.dtype``.

    Raises:
        ValueError: the name of a dtype is none of torch's.
    """
    dtype = getattr(torch, _SHORT.get(rollout_dtype, rollout_dtype), None)
    if not isinstance(dtype, torch.dtype):
        key = "actor_rollout_ref.rollout.dtype"
        raise ValueError(f"{key}={rollout_dtype!r}: not a torch dtype. Set {key}=bfloat16.")
    return WirePolicy(dtype, KEPT)
