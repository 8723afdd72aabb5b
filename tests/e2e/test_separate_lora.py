# SPDX-License-Identifier: Apache-2.0
"""verl's ``separate_async`` trainer with a LoRA adapter that all engines serve, also the one on a GPU of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FACTORS = 2 * 2 * 7  # A and B of seven linear layers in two blocks


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of two trainer ranks; the engines start with random weights, so the base must have travelled."""
    overrides = (
        "+sync=separate",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=0",  # answers are of the version that the trainer holds
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=2",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.update_weights_bucket_megabytes=1",
        f"{ROLLOUT}.custom.sync.timeout_seconds=90",
        f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native",
        f"{MODEL}.lora.rank=8",
        f"{MODEL}.lora.alpha=16",
        f"{MODEL}.lora.merge=False",
        "++ray_kwargs.ray_init.num_gpus=4",
    )
    return main_ppo(Setup(overrides, 2, 2, Path(tiny_model("qwen2"))), tmp_path_factory.mktemp("served"))


def test_its_answers_are_the_trainers(served: Run) -> None:
    checks.reached(served, steps=2)
    for metrics in served.logged.values():
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0, metrics
    checks.same_weights(served)
    assert not served.matching("stock verl moves the weights|stock loading"), served.tail


def test_the_base_travels_once(served: Run) -> None:
    separate = [report for report in served.reports if report["manager"] == "SeparateRollout"]
    first, *later = separate
    assert first["buckets"] > 0 and first["coverage_expected"] > 0 and not first["coverage_missing"], first
    assert [report["global_steps"] for report in separate] == [0, 1, 2]
    assert all(report["buckets"] == 0 and report["tensors"] == FACTORS for report in later), later
