# SPDX-License-Identifier: Apache-2.0
"""Models whose trained weights SGLang cannot be given, known by their ``config.json`` before anything is sent.

What is not in this table is proven by the first sync of every run: it fails when a tensor is sent that the engine does
not use, or a parameter stays unwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_sync_plugin.config.settings import TURN_OFF

# Where SGLang builds experts into every layer, whatever the configuration says about dense ones
EXPERTS_EVERYWHERE = (
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
)
# Whose tensors SGLang's class leaves out, and which
LEFT_OUT = {"Llama4ForCausalLM": "its loader for the text model alone knows no experts"}


def refuse_checkpoint(path: str) -> None:
    """Refuses a model whose checkpoint lies in a folder of this machine; any other is left to the first sync.

    Raises:
        ValueError: see ``refuse_family``.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):  # a name on the Hub, a remote folder, or none at all: verl says so
        return
    if isinstance(config, dict):
        refuse_family(path, config)


def refuse_family(path: str, config: Mapping[str, Any]) -> None:
    """Refuses what this module knows SGLang not to load.

    Args:
        path: ``actor_rollout_ref.model.path``, for the message.
        config: what the checkpoint's ``config.json`` says.

    Raises:
        ValueError: names the key, the architecture, the reason and the remedy.
    """
    for architecture in config.get("architectures") or ():
        why = _reason(architecture, config)
        if why:
            raise ValueError(
                f"actor_rollout_ref.model.path={path}: {architecture} {why}. Use another model, or {TURN_OFF}, "
                "which does not notice."
            )


def _reason(architecture: str, config: Mapping[str, Any]) -> str:
    if architecture in LEFT_OUT:
        return f"cannot be synced to SGLang: {LEFT_OUT[architecture]}"
    text: Mapping[str, Any] = config.get("text_config") or config
    if architecture in EXPERTS_EVERYWHERE:
        layers, step = text.get("mlp_only_layers"), text.get("decoder_sparse_step")
        said = f"mlp_only_layers={layers}" if layers else f"decoder_sparse_step={step}" if step not in (None, 1) else ""
        if said:
            return f"with {said} cannot be synced to SGLang: it builds experts into every layer"
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "a quantization_config")
        return f"with {method} cannot be synced to SGLang: weights travel unquantized, and its checkpoint is quantized"
    return ""
