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

from verl_sync_plugin.config.settings import PREFIX, TURN_OFF, given_value, lora_rank_of, section
from verl_sync_plugin.lora.refusals import LEAVE_OUT
from verl_sync_plugin.lora.settings import PEFT_KEY
from verl_sync_plugin.rollouts.sglang.arguments import (
    ARGUMENTS,
    changed_config,
    engine_arguments,
    refuse_arguments,
)

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

# What verl 0.9.1 and SGLang 0.5.12 make of ``rollout.quantization=fp8``: every parameter of a tiny model was compared
# with the same class in bfloat16, on one rank. verl chooses what it quantizes by names, SGLang by its modules.
FP8_RIGHT = frozenset(
    {
        *("ApertusForCausalLM", "ArceeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "GemmaForCausalLM"),
        *("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM", "Gemma2ForCausalLM"),
        *("Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GraniteForCausalLM"),
        *("HunYuanDenseV1ForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
    }
)
FP8_RAISES = frozenset(
    {
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "GPT2LMHeadModel"),
        *("GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "OlmoForCausalLM", "StableLmForCausalLM"),
    }
)
_DROPS_SCALES = "SGLang drops the scales of its weights"
_BARE_EXPERTS = "verl does not quantize its experts, and SGLang holds them in fp8 without their scales"
_QUANTIZED_GATE = "verl quantizes the gate of its shared expert, and SGLang holds it in bfloat16"
_OTHER_TENSORS = "verl quantizes other tensors of it than SGLang holds in fp8"
FP8_WRONG = {
    "LlamaForCausalLM": _DROPS_SCALES,
    "MistralForCausalLM": _DROPS_SCALES,
    "Ministral3ForCausalLM": _DROPS_SCALES,
    "Phi3ForCausalLM": _DROPS_SCALES,
    # Not tried; SGLang's classes for these are its Llama with another name
    "InternLM3ForCausalLM": _DROPS_SCALES,
    "IQuestCoderForCausalLM": _DROPS_SCALES,
    "TeleFLMForCausalLM": _DROPS_SCALES,
    "MixtralForCausalLM": _BARE_EXPERTS,
    "PhiMoEForCausalLM": _BARE_EXPERTS,
    "PhimoeForCausalLM": _BARE_EXPERTS,
    "GraniteMoeForCausalLM": _BARE_EXPERTS,
    "Lfm2MoeForCausalLM": _OTHER_TENSORS,
    "OPTForCausalLM": _OTHER_TENSORS,
    "Qwen2MoeForCausalLM": _QUANTIZED_GATE,
    "Qwen3NextForCausalLM": _QUANTIZED_GATE,  # not tried; it has the same gate
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
    config = _config_in(path)
    refuse_family(path, config)
    overrides = override_config or {}
    ours = _layers(config, overrides.get("model_config", overrides))
    theirs = _layers(config, changed_config(rollout or {}))
    if config and ours != theirs:
        keys = "actor_rollout_ref.model.override_config", f"{ARGUMENTS}.json_model_override_args"
        given = f"{keys[0]}={overrides}" if overrides else f"{keys[1]}={dict(changed_config(rollout or {}))}"
        raise ValueError(
            f"{given}: the trainer's model has {ours} layers (num_hidden_layers), SGLang's {theirs}. Change both, "
            f"the trainer's by {keys[0]}, SGLang's by {keys[1]}."
        )


def _config_in(path: str) -> dict[str, Any]:
    """A checkpoint's ``config.json`` in a folder of this machine; empty where there is none."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):  # a name on the Hub, a remote folder, or none at all: verl says so
        return {}
    return config if isinstance(config, dict) else {}


def _layers(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The number of decoder layers that a changed config names; ``None`` where it does not say."""
    if config.get("text_config"):
        config, changes = config["text_config"], changes.get("text_config") or {}
    return changes.get("num_hidden_layers", config.get("num_hidden_layers"))


def refuse_stock(rollout: Any, model: Any) -> str:
    """See ``Rollout.refuse_stock``."""
    refuse_arguments(engine_arguments(rollout).get, ARGUMENTS, TURN_OFF)
    quantization = given_value(rollout, "quantization", f"{PREFIX}.quantization")
    path = str(model.get("path", None))
    if quantization is None:
        refuse_checkpoint(path)
        return ""
    key = f"{PREFIX}.quantization={quantization!r}"
    if quantization != "fp8":
        raise ValueError(f"{key}: verl quantizes for SGLang to fp8 alone. Use fp8, or remove it.")
    if overrides := engine_arguments(rollout).get("json_model_override_args", None):
        raise ValueError(
            f"{ARGUMENTS}.json_model_override_args={overrides!r} with {key}: it replaces what verl says there of its "
            "fp8 weights. Remove one of the two."
        )
    merge = section(model, "lora", "actor_rollout_ref.model.lora").get("merge", False)
    if (rank := lora_rank_of(model)) and not merge:
        raise ValueError(
            f"{key} with actor_rollout_ref.model.lora.merge=False and LoRA rank {rank}: under an adapter that SGLang "
            "serves it does not find the scales of the base's fp8 weights. Set actor_rollout_ref.model.lora.merge=True."
        )
    return refuse_fp8(path)


def refuse_fp8(path: str) -> str:
    """Refuses a model of which stock verl's ``rollout.quantization=fp8`` puts wrong weights into SGLang.

    Args:
        path: ``actor_rollout_ref.model.path``, in a folder of this machine or on the Hub.

    Returns:
        What else is to be said of it; empty for a model that is known to be right.

    Raises:
        ValueError: names the key, the architecture, the reason and the remedy.
    """
    config = _config_in(path) or _config_on_hub(path)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    # verl's fp8 takes the place of the checkpoint's own
    same = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    refuse_family(path, plain if same else config)
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in architectures:
        why = _OTHER_TENSORS if "vision_config" in config else FP8_WRONG.get(name)
        if why:
            raise ValueError(
                f"actor_rollout_ref.rollout.quantization='fp8' with actor_rollout_ref.model.path={path}: {why} "
                f"({name}), so SGLang would generate with wrong weights, without an error. Remove "
                f"actor_rollout_ref.rollout.quantization, or {TURN_OFF}, which does not notice."
            )
    if architectures and FP8_RIGHT.issuperset(architectures):
        return ""
    shown = ", ".join(architectures) or f"the model {path}, whose config.json cannot be read here,"
    if FP8_RAISES.intersection(architectures):
        return f"With {shown} SGLang is known to end at the first sync of verl's fp8"
    return (
        f"It is NOT KNOWN whether verl's fp8 puts the right weights of {shown} into SGLang; look at "
        "training/rollout_probs_diff_mean (rollout.calculate_log_probs=True) of the first step"
    )


def _config_on_hub(path: str) -> dict[str, Any]:
    """``config.json`` of a name on the Hub; empty where it cannot be had."""
    from transformers import PretrainedConfig

    try:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(path)[0]
    except (OSError, ValueError):  # verl says so
        return {}
    return config


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
