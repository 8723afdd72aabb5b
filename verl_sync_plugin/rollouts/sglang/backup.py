# SPDX-License-Identifier: Apache-2.0
"""Whether SGLang keeps a host copy of its weights while it sleeps.

The copy costs seconds per step (its allocation, not the transfer) and is overwritten by the next sync, so it is needed
only for weights that no sync writes.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.sglang_rollout.utils import lora_served_as_adapter

# Families for which tests of this project show that a sync writes every parameter and persistent buffer; for the last
# one a run on GPUs without the copy shows it too (mla-7b-2gpu-megatron-bridge-ep2-tp2-full in benchmarks/results).
# The ledger checks it again in every run; an architecture outside this list keeps the copy.
COVERED_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",  # Moonlight too
    }
)


def keep_cpu_backup(rollout: Any, model: Any) -> bool:
    """The decision for one rollout engine; the same in every process.

    Args:
        rollout: verl's ``RolloutConfig``.
        model: verl's ``HFModelConfig``.
    """
    if lora_served_as_adapter(model):
        return True  # the weights stay resident, so no copy is ever made; and verl's launch insists
    if rollout.get("quantization", None) is not None:
        return True
    return not covered(getattr(model.hf_config, "architectures", None) or [])


def covered(architectures: list[str]) -> bool:
    """Whether a sync is known to write every parameter and persistent buffer of a model.

    Args:
        architectures: of its config.
    """
    return bool(architectures) and COVERED_ARCHITECTURES.issuperset(architectures)
