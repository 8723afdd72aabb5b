# SPDX-License-Identifier: Apache-2.0
"""Cleans the names of parameters, and counts the layers that a configuration names."""

from __future__ import annotations

from typing import Any

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """A module or parameter name without the segments that FSDP1 and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layers_of(config: Any) -> int:
    """How many decoder layers a model's configuration names; 0 where it does not say."""
    number = getattr(getattr(config, "text_config", None) or config, "num_hidden_layers", 0)
    return number if isinstance(number, int) else 0
