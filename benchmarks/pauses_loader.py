# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for SGLang's scheduler that take a tensor from the request, and else do as ours."""

from __future__ import annotations

from typing import Any

from verl_sync_plugin.rollouts.sglang.loader import forget_prefixes, wait_for_forwards

LOADER = f"{__name__}.load"
FORGETTING_LOADER = f"{__name__}.load_and_forget_prefixes"


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """The stock twin of ``rollouts.sglang.loader.load``."""
    wait_for_forwards(model)
    model.load_weights(named_tensors)


def load_and_forget_prefixes(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """The stock twin of ``rollouts.sglang.loader.load_and_forget_prefixes``."""
    forget_prefixes()
    load(model, named_tensors)
