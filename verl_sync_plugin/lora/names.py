"""Names in the state dict of a PEFT model. Pure; imports nothing."""

from __future__ import annotations


def is_adapter(name: str) -> bool:
    """Whether a state-dict key belongs to an adapter."""
    return ".lora_" in name


def merged_name(name: str) -> str | None:
    """The HF name of a PEFT state-dict key; ``None`` for what does not travel; adapters keep their key."""
    if is_adapter(name):
        return name
    if ".original_module." in name:
        return None
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:
        where = parts.index("modules_to_save")
        del parts[where : where + 2]  # modules_to_save.<adapter>
    return ".".join(part for part in parts if part != "base_layer")
