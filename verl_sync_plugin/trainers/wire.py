# SPDX-License-Identifier: Apache-2.0
"""The wire dtype that a sync's settings ask for."""

from __future__ import annotations

import torch

from verl_sync_plugin.config.settings import KEY_PREFIX, SyncConfig
from verl_sync_plugin.trainers.base import WirePolicy

_SHORT = {"half": "float16", "float": "float32"}


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
