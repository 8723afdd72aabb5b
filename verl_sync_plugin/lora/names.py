# SPDX-License-Identifier: Apache-2.0
"""Names in the state dict of a PEFT model. Pure; imports nothing."""

from __future__ import annotations

from collections.abc import Mapping

ADAPTER = "default"  # verl's name for its adapter

_NOTHING: Mapping[str, str | None] = {}


def is_adapter(name: str) -> bool:
    """Whether a state-dict key belongs to an adapter."""
    return ".lora_" in name


def adapter_of(name: str) -> str:
    """The adapter to which a factor's state-dict key belongs."""
    _, _, rest = name.partition(".lora_")
    return rest.split(".")[1]


def served_name(key: str, adapter: str) -> str:
    """The name of a factor in an adapter checkpoint: PEFT's state-dict key without the adapter's own name."""
    return key.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")


def plain_name(name: str) -> str:
    """The name of a module or a state-dict key in the model that PEFT has wrapped."""
    return name.removeprefix("base_model.model.")


def merged_name(name: str, in_use: Mapping[str, str | None] = _NOTHING) -> str | None:
    """The HF name of a PEFT state-dict key; ``None`` for what does not travel; adapters keep their key.

    Args:
        name: the key.
        in_use: of modules that PEFT has copied for its adapters, whose copy computes; see ``copies_in_use``. Of a
            module that is not among them, any copy.
    """
    if is_adapter(name):
        return name
    parts = plain_name(name).split(".")
    for mark, length in (("modules_to_save", 2), ("original_module", 1)):
        if mark in parts:
            where = parts.index(mark)
            owner = parts[where + 1] if length == 2 else None
            if in_use.get(".".join(parts[:where]), owner or "an adapter") != owner:
                return None
            del parts[where : where + length]
            break
    return ".".join(part for part in parts if part != "base_layer")
