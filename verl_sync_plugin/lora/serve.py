"""What SGLang needs to serve an adapter itself (``lora.merge=False``): settings, names and bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from verl_sync_plugin.lora.settings import PREFIX

MERGE = f"Set {PREFIX}.lora.merge=True, which serves it merged"


def refuse_unservable(config: Any) -> None:
    """What of an adapter SGLang would drop or misread.

    Args:
        config: PEFT's ``LoraConfig``.

    Raises:
        ValueError: names the setting and the remedy.
    """
    unservable = {
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,  # it scales by alpha / r whatever this says
        "modules_to_save": config.modules_to_save,
        "bias": config.bias if config.bias != "none" else None,
        "lora_bias": getattr(config, "lora_bias", None),
        "target_parameters": getattr(config, "target_parameters", None),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "fan_in_fan_out": config.fan_in_fan_out,
    }
    for key, value in unservable.items():
        if value:
            raise ValueError(
                f"{PREFIX}.lora.merge=False: SGLang cannot serve an adapter with {key}={value!r}. {MERGE}."
            )


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
