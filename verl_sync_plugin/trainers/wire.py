# SPDX-License-Identifier: Apache-2.0
"""The dtypes in which parameters travel, and the settings that choose them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.lora.peft import is_adapter

_SHORT = {"half": "float16", "float": "float32"}


@dataclass
class WirePolicy:
    """Which dtype a parameter travels in; one object for all sources of a trainer.

    Attributes:
        dtype: for floating-point parameters.
        keep: patterns of HF names whose parameters keep the trainer's dtype (routers and the like).
        engine: dtype of the engine's model, which it is known to keep parameters in; ``None`` where that is ``dtype``.
        wider: what the engine said it would take, by HF name.
    """

    dtype: torch.dtype
    keep: tuple[str, ...] = ()
    engine: torch.dtype | None = None
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
        least = max(self.dtype.itemsize, (self.engine or self.dtype).itemsize)
        found = min(widest, dtype, key=lambda each: each.itemsize)
        return self.dtype if widest.itemsize <= least or found.itemsize < self.dtype.itemsize else found

    def learn(self, wider: Mapping[str, torch.dtype]) -> bool:
        """Takes in what the engine would take; returns whether anything that was asked for travels otherwise now."""
        before = {names: self.of_parameter(names, dtype) for names, dtype in list(self._asked.items())}
        self.wider |= wider
        return any(self.of_parameter(names, self._asked[names]) != wire for names, wire in before.items())


def wire_policy(config: SyncConfig, rollout_dtype: str) -> WirePolicy:
    """The wire dtype policy of a sync, from its settings.

    Args:
        config: the sync's settings.
        rollout_dtype: ``rollout.dtype``, what ``wire_dtype=auto`` means.

    Raises:
        ValueError: the name of a dtype is none of torch's.
    """
    name = rollout_dtype if config.wire_dtype == "auto" else config.wire_dtype
    dtype = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"actor_rollout_ref.rollout.dtype={name!r}: not a torch dtype. Set {KEY_PREFIX}.wire_dtype=bfloat16."
        )
    engine = getattr(torch, _SHORT.get(rollout_dtype, rollout_dtype), None)
    return WirePolicy(dtype, config.keep_dtype, engine if isinstance(engine, torch.dtype) else None)
