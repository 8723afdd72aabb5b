# SPDX-License-Identifier: Apache-2.0
"""Model families as tiny configurations, for the table in ``docs/families.md``."""

from __future__ import annotations

from typing import Any

DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 330,  # no multiple of SGLang's padding
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS_OF_16 = {**DENSE, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
}
QWEN_VISION = {
    "depth": 2,
    "in_chans": 3,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GEMMA_3 = {
    **HEADS_OF_16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}

# name -> model_type and what its configuration is given
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {**DENSE, **UNTIED}),
    "Llama, tied": ("llama", {**DENSE, **TIED}),
    "Qwen2": ("qwen2", {**DENSE, **UNTIED}),
    "Qwen2, tied": ("qwen2", {**DENSE, **TIED}),
    "Qwen3": ("qwen3", {**HEADS_OF_16, **UNTIED}),
    "Qwen3, tied": ("qwen3", {**HEADS_OF_16, **TIED}),
    "Mistral": ("mistral", {**HEADS_OF_16, **UNTIED}),
    "Ministral 3": ("ministral3", {**HEADS_OF_16, **UNTIED}),
    "Phi-3": ("phi3", {**DENSE, **UNTIED}),
    "Phi-1.5": ("phi", {**DENSE, "num_key_value_heads": 4, **UNTIED}),
    "Gemma": ("gemma", HEADS_OF_16),
    "Gemma 2": ("gemma2", {**HEADS_OF_16, "hidden_act": "gelu_pytorch_tanh"}),
    "Gemma 3, text": ("gemma3_text", GEMMA_3),
    "Cohere": ("cohere", DENSE),
    "Cohere 2": ("cohere2", HEADS_OF_16),
    "Granite": ("granite", {**DENSE, **UNTIED}),
    "OLMo": ("olmo", {**DENSE, "num_key_value_heads": 4, **UNTIED}),
    "OLMo 2": ("olmo2", {**DENSE, **UNTIED}),
    "OLMo 3": ("olmo3", {**DENSE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, **UNTIED}),
    "StarCoder2": ("starcoder2", {**DENSE, **UNTIED}),
    "StableLM": ("stablelm", {**DENSE, **UNTIED}),
    "GLM-4": ("glm4", {**HEADS_OF_16, **UNTIED}),
    "Exaone 4": ("exaone4", {**HEADS_OF_16, "sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"], **UNTIED}),
    "Apertus": ("apertus", {**DENSE, **UNTIED}),
    "Arcee": ("arcee", {**DENSE, **UNTIED}),
    "SmolLM3": ("smollm3", {**DENSE, **UNTIED}),
    "Seed-OSS": ("seed_oss", {**HEADS_OF_16, **UNTIED}),
    "HunYuan, dense": ("hunyuan_v1_dense", {**HEADS_OF_16, "use_qk_norm": True, **UNTIED}),
    "Ernie 4.5": ("ernie4_5", {**HEADS_OF_16, **UNTIED}),
    "GPT-2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 330, "n_positions": 512}),
    "OPT": (
        "opt",
        {
            "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 330,
            "max_position_embeddings": 512, "word_embed_proj_dim": 64,
        },
    ),
    "Mixtral": ("mixtral", {**HEADS_OF_16, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "Qwen2-MoE": ("qwen2_moe", {**DENSE, **EXPERTS, "shared_expert_intermediate_size": 32, **UNTIED}),
    "Qwen3-MoE": ("qwen3_moe", {**HEADS_OF_16, **EXPERTS, **UNTIED}),
    "Qwen3-MoE, dense layers": ("qwen3_moe", {**HEADS_OF_16, **EXPERTS, "mlp_only_layers": [0], **UNTIED}),
    "Qwen3-Next": (
        "qwen3_next",
        {
            **HEADS_OF_16, **EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads_cpu": 4, "linear_num_key_heads_cpu": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"], **UNTIED,
        },
    ),
    "OLMoE": ("olmoe", {**DENSE, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "Granite, MoE": ("granitemoe", {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "Phi-3.5-MoE": ("phimoe", {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "DeepSeek-V2": ("deepseek_v2", {**DENSE, **LATENT, "q_lora_rank": None, "rope_parameters": YARN, **UNTIED}),
    "DeepSeek-V3": ("deepseek_v3", {**DENSE, **LATENT, "q_lora_rank": 48, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": YARN, **UNTIED}),
    "GLM-4-MoE": (
        "glm4_moe",
        {
            **HEADS_OF_16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, **UNTIED,
        },
    ),
    "Ernie 4.5, MoE": (
        "ernie4_5_moe",
        {**DENSE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1, **UNTIED},
    ),
    "MiniMax-M2": ("minimax_m2", {**HEADS_OF_16, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "gpt-oss": ("gpt_oss", {**HEADS_OF_16, "swiglu_limit": 7.0, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "Llama 4, text": (
        "llama4_text",
        {
            **HEADS_OF_16, "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, **UNTIED,
        },
    ),
    "LFM2": ("lfm2", {**DENSE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "Qwen2-VL": (
        "qwen2_vl",
        {"text_config": {**DENSE, **MROPE, **UNTIED}, "vision_config": QWEN_VISION, **UNTIED},
    ),
    "Qwen2.5-VL": (
        "qwen2_5_vl",
        {
            "text_config": {**DENSE, **MROPE, **UNTIED},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
                "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **UNTIED,
        },
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        {
            "text_config": {**HEADS_OF_16, **MROPE, **UNTIED},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
                "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **UNTIED,
        },
    ),
    "Qwen3-VL-MoE": (
        "qwen3_vl_moe",
        {
            "text_config": {**HEADS_OF_16, **EXPERTS, **MROPE, **UNTIED},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2,
                "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **UNTIED,
        },
    ),
    "Gemma 3, multimodal": (
        "gemma3",
        {"text_config": GEMMA_3, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    ),
    "LLaVA": (
        "llava",
        {
            "text_config": {"model_type": "llama", **DENSE, **UNTIED},
            "vision_config": {"model_type": "clip_vision_model", **SIGLIP},
            **UNTIED,
        },
    ),
    "Mistral 3, multimodal": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **HEADS_OF_16, **UNTIED},
            "vision_config": {"model_type": "pixtral", **SIGLIP, "head_dim": 16},
            **UNTIED,
        },
    ),
}  # fmt: skip
