# SPDX-License-Identifier: Apache-2.0
"""Engines that nobody trains, next to the actor's: a distillation teacher and a reward model. Nothing syncs them, so
they are verl's own, whether the plugin is on or off; the actor's engine is synced as always."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
TEACHER = "distillation.teacher_models.teacher_model"
REWARD = "reward.reward_model"
# What run.sh says of the actor's engine
ON_A_CPU = (
    *("device=cpu", "attention_backend=torch_native", "sampling_backend=pytorch", "enable_memory_saver=False"),
    *("disable_overlap_schedule=True", "max_total_tokens=8192", "log_level=warning", "sleep_on_idle=True"),
    "grammar_backend=none",  # needed where the engine has a tokenizer, as a reward model's
)


def engine(rollout: str) -> tuple[str, ...]:
    """An engine of one rank under a rollout config of verl's."""
    sizes = ("tensor_model_parallel_size=1", "gpu_memory_utilization=0.1", "max_num_seqs=16")
    named = (f"{rollout}.{size}" for size in ("name=sglang", *sizes))
    return (*named, *(f"+{rollout}.engine_kwargs.sglang.{argument}" for argument in ON_A_CPU))


def overrides(model: Path) -> tuple[str, ...]:
    return (
        *("distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"),
        *(f"{TEACHER}.model_path={model}", *engine(f"{TEACHER}.inference")),
        *(f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True", f"{REWARD}.nnodes=1"),
        *(f"{REWARD}.n_gpus_per_node=1", f"{REWARD}.model_path={model}", *engine(f"{REWARD}.rollout")),
        *(f"{REWARD}.rollout.prompt_length=64", f"{REWARD}.rollout.response_length=16"),
        "++ray_kwargs.ray_init.num_gpus=3",
        f"{ROLLOUT}.load_format=dummy",
    )


def servers(run: Run, name: str) -> int:
    """How many server actors of a class were made."""
    return len(run.matching(rf"\({name} pid=\d+\) .*SGLang http server: "))


def test_a_teacher_and_a_reward_model_run_next_to_a_synced_actor(larger_model: Path, tmp_path: Path) -> None:
    bucket = f"{ROLLOUT}.update_weights_bucket_megabytes=1"
    run = main_ppo(
        Setup((*overrides(larger_model), bucket), model=larger_model, modules=("e2e.teacher_sampling",)), tmp_path
    )
    checks.reached(run, steps=1)
    checks.same_weights(run)
    checks.plugin_ran(run, ranks=1)
    assert "actor/distillation/loss" in " ".join(run.logged[1]), run.logged[1]
    assert (servers(run, "SyncSGLangHttpServer"), servers(run, "SGLangHttpServer")) == (1, 2), run.tail
