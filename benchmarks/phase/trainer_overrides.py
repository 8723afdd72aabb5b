# SPDX-License-Identifier: Apache-2.0
"""Hydra overrides that choose the trainer's backend and how Megatron shares out the model."""

from __future__ import annotations

from benchmarks.phase.cases import Case

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"


def _megatron_sizes(case: Case) -> list[str]:
    """The parallel sizes beyond tensor and pipeline, where they are asked for."""
    sizes = {
        "virtual_pipeline_model_parallel_size": (case.train_vpp, 1),
        "context_parallel_size": (case.train_cp, 1),
        "expert_model_parallel_size": (case.train_ep, 1),
        "expert_tensor_parallel_size": (case.train_etp, 0),
    }
    return [f"{_MEGATRON}.{key}={size}" for key, (size, default) in sizes.items() if size != default]


def of(case: Case) -> list[str]:
    """The overrides of ``case`` for its trainer."""
    if case.strategy != "megatron":
        return [f"{_ACTOR}.strategy={case.strategy}"]
    transformer = f"{_MEGATRON}.override_transformer_config"
    unfused = ("gradient_accumulation_fusion", "persist_layer_norm", "masked_softmax_fusion")
    overrides = [
        "model_engine=megatron",
        f"{_MEGATRON}.tensor_model_parallel_size={case.train_tp}",
        f"{_MEGATRON}.pipeline_model_parallel_size={case.train_pp}",
        *_megatron_sizes(case),
        f"{_MEGATRON}.vanilla_mbridge={case.bridge == 'mbridge'}",
        f"{_MEGATRON}.use_remove_padding=False",
        "actor_rollout_ref.ref.megatron.use_remove_padding=False",
        f"++{transformer}.attention_backend=unfused",
        f"++{transformer}.apply_rope_fusion=False",
        *(f"+{transformer}.{key}=False" for key in unfused),
        # Megatron's own norm, which is all there is without TransformerEngine, refuses sequence parallelism
        f"{_MEGATRON}.sequence_parallel=False",
        "actor_rollout_ref.ref.megatron.sequence_parallel=False",
        f"+{transformer}.sequence_parallel=False",
    ]
    unfused = ("bias_dropout_fusion", "bias_activation_fusion")
    if case.bridge == "megatron-bridge":  # it turns these on by itself
        unfused += ("moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap", "cross_entropy_loss_fusion")
        overrides.append(f"+{transformer}.transformer_impl=local")
    if case.device == "cpu":
        overrides.append(f"+{transformer}.use_cpu_initialization=True")
    if case.bridge == "megatron-bridge" or case.device == "cpu":
        overrides += [f"+{transformer}.{key}=False" for key in unfused]
    return overrides
