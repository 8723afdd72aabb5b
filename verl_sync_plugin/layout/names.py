# SPDX-License-Identifier: Apache-2.0
"""Cleans the names of parameters."""

from __future__ import annotations

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """A module or parameter name without the segments that FSDP1 and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
