# SPDX-License-Identifier: Apache-2.0
"""Custom loaders for tests that take whole tensors from the request, with what ours do before they write any. They run
in the scheduler."""

from __future__ import annotations

from typing import Any

import torch

from verl_sync_plugin.rollouts.sglang.loader import forget_prefixes, wait_for_forwards


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Beside ``loader.load``."""
    wait_for_forwards(model)
    model.load_weights(named_tensors)


def load_and_forget_prefixes(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Beside ``loader.load_and_forget_prefixes``."""
    forget_prefixes()
    load(model, named_tensors)
