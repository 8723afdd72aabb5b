# SPDX-License-Identifier: Apache-2.0
"""The dtypes in which parameters travel, and the settings that choose them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.lora.names import is_adapter

_SHORT = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class WirePolicy:
    """Which dtype a parameter travels in.

    Attributes:
        dtype: for floating-point parameters.
        keep: patterns of HF names whose parameters keep the trainer's dtype (routers and the like).
    """

    dtype: torch.dtype
    keep: tuple[str, ...] = ()

    def of_parameter(self, names: list[str], dtype: torch.dtype) -> torch.dtype:
        """The wire dtype of one storage, given all its names. Adapters are exchanged among trainers only and keep
        theirs."""
        served = [name for name in names if not is_adapter(name)]
        if not served or not dtype.is_floating_point:
            return dtype
        return dtype if any(re.search(p, name) for p in self.keep for name in served) else self.dtype


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
    return WirePolicy(dtype, config.keep_dtype)
