# SPDX-License-Identifier: Apache-2.0
"""LoRA on a Megatron trainer in verl's own ``main_ppo``, through its default bridge: merged, and served.

``make test`` has the run in which the engine serves the adapter; merged weights it has with FSDP (``test_lora.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = "MegatronSGLangShardingManager"
COMMON = (
    f"{ROLLOUT}.load_format=dummy",
    f"{ROLLOUT}.update_weights_bucket_megabytes=1",
    f"{ROLLOUT}.custom.sync.timeout_seconds=90",
    f"{MODEL}.lora.rank=8",
    f"{MODEL}.lora.alpha=16",
)
TENSOR_PARALLEL = (2, 1, 1)


@pytest.fixture(scope="module")
def merged(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs; the reference is the model without its adapter."""
    overrides = (
        *COMMON,
        f"{MODEL}.lora.merge=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    )
    setup = Setup(overrides, 2, 2, even_model, megatron=TENSOR_PARALLEL)
    return main_ppo(setup, tmp_path_factory.mktemp("merged"))


@pytest.mark.extended
def test_merged_run_reaches_its_steps_with_the_weights_of_every_step(merged: Run) -> None:
    checks.reached(merged, steps=2)
    checks.reported(merged, steps=2, manager=MANAGER)
    checks.same_weights(merged)


@pytest.mark.extended
def test_the_adapter_has_moved_the_model_and_was_merged_on_local_parts(merged: Run) -> None:
    assert merged.logged[2]["actor/kl_loss"] > 0.01, merged.logged
    assert not merged.matching("own weight stream"), merged.tail


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The engine serves the adapter; it starts with random weights, so the base must have travelled.

    Not the larger model: SGLang pads its layers on a CPU, and its adapters' memory, but not the adapters.
    """
    backend = f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native"
    setup = Setup(
        (*COMMON, f"{MODEL}.lora.merge=False", backend), 2, 2, Path(tiny_model("qwen2")), megatron=TENSOR_PARALLEL
    )
    return main_ppo(setup, tmp_path_factory.mktemp("served"))


def test_served_run_reaches_its_steps_and_the_base_travels_once(served: Run) -> None:
    checks.reached(served, steps=2)
    checks.reported(served, steps=2, manager=MANAGER)
    checks.same_weights(served)
    first, *later = served.reports
    assert first["buckets"] > 0 and first["coverage_expected"] > 0 and not first["coverage_missing"]
    assert all(report["buckets"] == 0 and report["tensors"] > 0 for report in later), later
    assert all(report["nbytes"] < first["nbytes"] / 3 for report in later)
