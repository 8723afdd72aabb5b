# SPDX-License-Identifier: Apache-2.0
"""Models whose trained weights SGLang cannot be given, known by their configuration before anything is sent.

What is not in this table is proven by the first sync of every run: it fails when a tensor is sent that the engine does
not use, or a parameter stays unwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_sync_plugin.config.settings import TURN_OFF
from verl_sync_plugin.lora.refusals import LEAVE_OUT
from verl_sync_plugin.lora.settings import PEFT_KEY
from verl_sync_plugin.rollouts.sglang.arguments import ARGUMENTS, changed_config

# Where SGLang builds experts into every layer, whatever the configuration says about dense ones
EXPERTS_EVERYWHERE = (
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
)
# Whose tensors SGLang's class cannot take again and again, and why
UNSYNCABLE = {
    "Llama4ForCausalLM": "its loader for the text model alone knows no experts",
    # apply_ape_hotfix of its compressor
    "DeepseekV4ForCausalLM": "its loader rearranges a parameter behind its first load, and behind no other",
}

# SGLang's classes (0.5.12) that cannot be launched untied: an adapter makes two weights of embedding and head, and
# these have one, whatever tie_word_embeddings says
_EMBEDDING_IS_HEAD = "computes logits with the embedding"
_SKIPS_HEAD = "skips lm_head.weight when it loads"
ALWAYS_TIED = {
    "CohereForCausalLM": _EMBEDDING_IS_HEAD,
    "Cohere2ForCausalLM": _EMBEDDING_IS_HEAD,
    "GemmaForCausalLM": _EMBEDDING_IS_HEAD,
    "Gemma2ForCausalLM": _EMBEDDING_IS_HEAD,
    "Gemma3ForCausalLM": _SKIPS_HEAD,
    "Gemma3ForConditionalGeneration": _SKIPS_HEAD,
    "Gemma3nForCausalLM": _EMBEDDING_IS_HEAD,
    "Gemma3nForConditionalGeneration": _EMBEDDING_IS_HEAD,
    "Gemma4ForConditionalGeneration": _EMBEDDING_IS_HEAD,
    "GPT2LMHeadModel": _EMBEDDING_IS_HEAD,
    "GPTBigCodeForCausalLM": _EMBEDDING_IS_HEAD,
}


def refuse_checkpoint(path: str, override_config: Any = None, rollout: Any = None) -> None:
    """Refuses a model whose checkpoint lies in a folder of this machine; any other is left to the first sync.

    Args:
        path: ``actor_rollout_ref.model.path``.
        override_config: what the trainer changes of the checkpoint's config.
        rollout: verl's rollout config, which says what SGLang changes of it.

    Raises:
        ValueError: see ``refuse_family``; or trainer and engine have different numbers of layers.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):  # a name on the Hub, a remote folder, or none at all: verl says so
        return
    if isinstance(config, dict):
        refuse_family(path, config)
        overrides = override_config or {}
        ours = _layers(config, overrides.get("model_config", overrides))
        theirs = _layers(config, changed_config(rollout or {}))
        if ours != theirs:
            raise ValueError(
                f"actor_rollout_ref.model.override_config={overrides}: the trainer's model has {ours} layers "
                f"(num_hidden_layers), SGLang's {theirs}. Change both alike, SGLang's by "
                f"{ARGUMENTS}.json_model_override_args."
            )


def _layers(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The number of decoder layers that a changed config names; ``None`` where it does not say."""
    if "text_config" in config:
        config, changes = config["text_config"], changes.get("text_config") or {}
    return changes.get("num_hidden_layers", config.get("num_hidden_layers"))


def refuse_family(path: str, config: Mapping[str, Any]) -> None:
    """Refuses what this module knows SGLang not to load.

    Args:
        path: ``actor_rollout_ref.model.path``, for the message.
        config: what the checkpoint's ``config.json`` says.

    Raises:
        ValueError: names the key, the architecture, the reason and the remedy.
    """
    for architecture in config.get("architectures") or ():
        why = reason_against(architecture, config)
        if why:
            raise ValueError(
                f"actor_rollout_ref.model.path={path}: {architecture} {why}. Use another model, or {TURN_OFF}, "
                "which does not notice."
            )


def reason_against(architecture: str, config: Mapping[str, Any]) -> str:
    """Why SGLang cannot be given a model of this architecture and ``config.json``; empty where it can."""
    if architecture in UNSYNCABLE:
        return f"cannot be synced to SGLang: {UNSYNCABLE[architecture]}"
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


def refuse_untied(architectures: Iterable[str], where: str) -> None:
    """Refuses a model of which SGLang's class has one weight for embedding and head.

    Args:
        architectures: of the model's config.
        where: what adapts or trains one of the two, for the message.

    Raises:
        ValueError: names the architecture, the reason and the remedy.
    """
    for name in architectures:
        if name in ALWAYS_TIED:
            raise ValueError(
                f"{where}: it changes the embedding or the head, and SGLang's {name} {ALWAYS_TIED[name]}, so it cannot "
                f"serve two different ones. {LEAVE_OUT}, or with actor_rollout_ref.actor.strategy=fsdp2 train one "
                f"copy for both: +{PEFT_KEY}.modules_to_save=[embed_tokens] and +{PEFT_KEY}.ensure_weight_tying=True."
            )
