# SPDX-License-Identifier: Apache-2.0
"""Covers LoRA in verl's own ``main_ppo``: merged on the way, or served by the engine as an adapter."""

import pytest

from e2e import checks
from e2e.runs import MODEL, ROLLOUT, SHORT_WAIT, Play, Run
from verl_sync_plugin.config.settings import SHORT_BUCKET_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

COMMON = (SHORT_WAIT, f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=16")
MERGED = (
    f"{MODEL}.lora.merge=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
)
SERVED = (f"{MODEL}.lora.merge=False", f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native")
MEGATRON = "MegatronSGLangShardingManager"


@pytest.mark.extended
def test_a_merged_run(play: Play) -> None:
    """Two ranks, three steps, so four syncs; with the size of a bucket by the short key."""
    merged = play(*COMMON, *MERGED, f"{SHORT_BUCKET_KEY}=512", kind="qwen2-tied", ranks=2, steps=3)
    checks.reached(merged, steps=3)
    checks.reported(merged, steps=3)
    assert all(each["staging_bytes"] > 0 for each in merged.reports), merged.reports
    # Unmerged weights would show: correlation 0.0, probabilities that differ by 0.009 to 0.025 from step 2 on
    checks.same_weights(merged)
    # The reference is the same model without its adapter, so this is how far unmerged weights would be off
    first, *later = (metrics["actor/kl_loss"] for metrics in merged.logged.values())
    assert abs(first) < 1e-6 and min(later) > 0.02, (first, later)
    assert all(abs(metrics["actor/ppo_kl"]) < 1e-6 for metrics in merged.logged.values()), "old and current policy"


def test_the_base_of_a_served_adapter_travels_once(play: Play) -> None:
    """By FSDP2, with every release of SGLang: ``test_old_and_new_sglang.py``."""
    served = play(*COMMON, *SERVED, ranks=2, steps=2, megatron=(2, 1, 1))
    checks.reached(served, steps=2)
    checks.reported(served, steps=2, manager=MEGATRON)
    served_right(served)


def served_right(served: Run) -> None:
    checks.same_weights(served)
    first, *later = served.reports
    assert first["buckets"] > 0 and first["coverage_expected"] > 0 and not first["coverage_missing"]
    assert all(report["buckets"] == 0 and report["tensors"] > 0 for report in later), later
    assert all(report["nbytes"] < first["nbytes"] / 3 for report in later)
