"""What SGLang needs to serve an adapter itself (``lora.merge=False``): settings, names and bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def served_name(key: str, adapter: str) -> str:
    """The name of a factor in an adapter checkpoint: PEFT's state-dict key without the adapter's own name."""
    return key.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")


def served_settings(config: Any) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter as builtins.

    Args:
        config: PEFT's ``LoraConfig``.
    """
    from verl.workers.rollout.sglang_rollout.utils import normalize_peft_config_for_sglang

    settings: dict[str, Any] = normalize_peft_config_for_sglang(config.to_dict())
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def pack_adapter(tensors: dict[str, torch.Tensor]) -> bytes:
    """An adapter as SGLang unpickles it. By value: SGLang keeps adapters in host memory, and one blob serves all ranks.

    A shared handle would be opened by every tensor-parallel rank but counted once, which leaks it on every sync.

    Args:
        tensors: by name; on the host.
    """
    file = io.BytesIO()
    pickle.dump(tensors, file, protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()
