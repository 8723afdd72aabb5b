# SPDX-License-Identifier: Apache-2.0
"""Model families as tiny configurations, for the table in ``docs/families.md``."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

# The vocabulary is no multiple of SGLang's padding
DENSE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 330, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
HEADS = {**DENSE, "head_dim": 16}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
ROUTED_EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **DENSE, **ROUTED_EXPERTS, "num_key_value_heads": 4, "moe_layer_freq": 1, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
    "rope_parameters": YARN,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
GEMMA_3 = {
    **HEADS,
    **TIED,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA_4 = {
    **HEADS, **TIED, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 330, "attention_k_eq_v": False,
}  # fmt: skip
# SGLang on a CPU pads the heads of these layers and keeps their numbers in fields of their own
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_value_heads_cpu": 4, "linear_num_key_heads_cpu": 2, "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LLAMA_4 = {**HEADS, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2, **LOCAL_EXPERTS}
PROJECTOR = ("vision_output_dim", "projector_input_dim", "projector_output_dim")
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN2_VISION = {"depth": 2, "in_chans": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name
    config: dict[str, Any] = field(default_factory=dict)
    # Pattern and replacement of names in published checkpoints, unlike those of a model that was not loaded from one
    hub: tuple[str, str] | None = None
    transposed: str = ""  # names of tensors that published checkpoints hold transposed
    architecture: str = ""  # what published checkpoints call it, where that is not transformers' own name
    attention: str = "torch_native"  # a backend that SGLang accepts for it; nothing is computed with it here
    padded: bool = True  # as SGLang does experts on a CPU; else they are loaded as on a GPU, where that code is wrong

    def tied(self, tied: bool) -> Self:
        """The same with embedding and head tied, or not."""
        config = {**self.config, "tie_word_embeddings": tied}
        if "text_config" in config:
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": tied}
        return replace(self, config=config)


def _text_and_vision(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tie_word_embeddings": False, "text_config": text, "vision_config": vision, **more}


FAMILIES: dict[str, Family] = {
    "Llama": Family("llama", DENSE),
    "Llama, tied": Family("llama", {**DENSE, **TIED}),
    "Qwen2": Family("qwen2", DENSE),
    "Qwen2, tied": Family("qwen2", {**DENSE, **TIED}),
    "Qwen3": Family("qwen3", HEADS),
    "Qwen3, tied": Family("qwen3", {**HEADS, **TIED}),
    "Mistral": Family("mistral", HEADS),
    "Ministral 3": Family("ministral3", HEADS),
    "Phi-1.5": Family("phi", {**DENSE, "num_key_value_heads": 4}),
    "Phi-3": Family("phi3", DENSE),
    "Gemma": Family("gemma", {**HEADS, **TIED}),
    "Gemma 2": Family("gemma2", {**HEADS, **TIED, "hidden_act": "gelu_pytorch_tanh"}),
    "Gemma 3, text": Family("gemma3_text", GEMMA_3),
    "Gemma 4, MoE": Family("gemma4_text", GEMMA_4),
    "Cohere": Family("cohere", {**DENSE, **TIED}),
    "Cohere 2": Family("cohere2", {**HEADS, **TIED}),
    "Granite": Family("granite", DENSE),
    "OLMo": Family("olmo", {**DENSE, "num_key_value_heads": 4}),
    "OLMo 2": Family("olmo2", DENSE),
    "StarCoder2": Family("starcoder2", DENSE),
    "StableLM": Family("stablelm", DENSE),
    "GLM-4": Family("glm4", HEADS),
    "EXAONE 4": Family(
        "exaone4",
        {**HEADS, "sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"]},
        attention="triton",
    ),
    "Apertus": Family("apertus", DENSE),
    "Arcee": Family("arcee", DENSE),
    "SmolLM3": Family("smollm3", DENSE),
    "Seed-OSS": Family("seed_oss", HEADS),
    "HunYuan, dense": Family("hunyuan_v1_dense", {**HEADS, "use_qk_norm": True}),
    "ERNIE 4.5": Family("ernie4_5", HEADS),
    "LFM2": Family("lfm2", {**DENSE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "GPT-2": Family("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 330, "n_positions": 512}),
    "OPT": Family("opt", {**DENSE, **TIED, "word_embed_proj_dim": 64, "ffn_dim": 128}),
    "Mixtral": Family("mixtral", {**HEADS, **LOCAL_EXPERTS}),
    "Qwen2-MoE": Family("qwen2_moe", {**DENSE, **EXPERTS, **SHARED_EXPERT}),
    "Qwen2-MoE with dense layers": Family("qwen2_moe", {**DENSE, **EXPERTS, **SHARED_EXPERT, "mlp_only_layers": [0]}),
    "Qwen3-MoE": Family("qwen3_moe", {**HEADS, **EXPERTS}),
    "Qwen3-MoE with dense layers": Family("qwen3_moe", {**HEADS, **EXPERTS, "mlp_only_layers": [0]}),
    "Qwen3-Next": Family("qwen3_next", {**HEADS, **EXPERTS, **SHARED_EXPERT, **LINEAR_ATTENTION}),
    "OLMoE": Family("olmoe", {**DENSE, **EXPERTS, "num_key_value_heads": 4}),
    "Phi-3.5-MoE": Family("phimoe", {**DENSE, **LOCAL_EXPERTS, "lm_head_bias": True}, architecture="PhiMoEForCausalLM"),
    "Granite, MoE": Family("granitemoe", {**DENSE, **LOCAL_EXPERTS}),
    "Granite 4": Family(
        "granitemoehybrid",
        {**DENSE, **LOCAL_EXPERTS, "layer_types": ["attention", "attention"], "shared_intermediate_size": 32},
    ),
    "DeepSeek-V2": Family("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "DeepSeek-V3": Family("deepseek_v3", {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "GLM-4.5": Family("glm4_moe", {**HEADS, **ROUTED_EXPERTS}),
    "GLM-4.7-Flash": Family("glm4_moe_lite", LATENT),
    "ERNIE 4.5, MoE": Family(
        "ernie4_5_moe",
        {**DENSE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 1},
    ),
    "LFM2-MoE": Family(
        "lfm2_moe", {**DENSE, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    ),
    "Nemotron-H": Family("nemotron_h", HEADS, hub=(r"\.embedding\.weight$", ".embeddings.weight")),
    "gpt-oss": Family("gpt_oss", {**HEADS, **LOCAL_EXPERTS, "swiglu_limit": 7.0}, attention="triton", padded=False),
    "gpt-oss, quantized": Family(
        "gpt_oss", {**HEADS, **LOCAL_EXPERTS, "quantization_config": {"quant_method": "mxfp4"}}, attention="triton"
    ),
    "Llama 4, text": Family("llama4_text", LLAMA_4),
    "Llama 4, multimodal": Family(
        "llama4",
        _text_and_vision(
            {**LLAMA_4, "original_total_num_kv_heads": 2, "original_num_attention_heads": 4},
            {**SIGLIP, **dict.fromkeys(PROJECTOR, 32), "pixel_shuffle_ratio": 0.5},
        ),
    ),
    "Qwen2-VL": Family("qwen2_vl", _text_and_vision({**DENSE, **MROPE}, {**QWEN2_VISION, "patch_size": 4})),
    "Qwen2.5-VL": Family(
        "qwen2_5_vl",
        _text_and_vision({**DENSE, **MROPE}, {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}),
    ),
    "Qwen2.5-VL, tied": Family("qwen2_5_vl", {**_text_and_vision({**DENSE, **MROPE, **TIED}, QWEN_VISION), **TIED}),
    "Qwen3-VL, tied": Family("qwen3_vl", {**_text_and_vision({**HEADS, **MROPE, **TIED}, QWEN3_VISION), **TIED}),
    "Qwen3-VL": Family("qwen3_vl", _text_and_vision({**HEADS, **MROPE}, QWEN3_VISION)),
    "Qwen3-VL-MoE": Family(
        "qwen3_vl_moe",
        _text_and_vision({**HEADS, **MROPE, **EXPERTS}, QWEN3_VISION),
        transposed=r"\.mlp\.experts\.(gate_up|down)_proj$",
    ),
    "Qwen3.5": Family(
        "qwen3_5",
        _text_and_vision(
            {**HEADS, **MROPE, **LINEAR_ATTENTION},
            {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
        ),
    ),
    "GLM-4.1V": Family("glm4v", _text_and_vision({**HEADS, **MROPE}, {**QWEN_VISION, "image_size": 32})),
    "Gemma 3, multimodal": Family(
        "gemma3",
        {**_text_and_vision(GEMMA_3, {**SIGLIP, "vision_use_head": False}, mm_tokens_per_image=4), **TIED},
        hub=(r"^vision_tower\.", "vision_tower.vision_model."),
    ),
}
