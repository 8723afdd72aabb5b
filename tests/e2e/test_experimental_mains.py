# SPDX-License-Identifier: Apache-2.0
"""verl's ``one_step_off`` and ``fully_async``, which have mains, workers, managers and clients of their own: of the
plugin's they have the checkpoint engine, the training engine, the rollout adapter and the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import DUMMY, ROLLOUT, SHORT_WAIT, SMALL_BUCKETS, Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

COMMON = (
    f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=False",
    DUMMY,
    SMALL_BUCKETS,
    SHORT_WAIT,
    "++ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=64",  # their actors ask for ten each
)


def of_experimental(main: str, overrides: tuple[str, ...], model: str, folder: Path) -> Run:
    """Three steps of one trainer rank and a replica with a GPU of its own."""
    return main_ppo(Setup((*COMMON, *overrides), 1, 3, Path(model), main=f"verl.experimental.{main}"), folder)


@pytest.fixture(scope="module")
def one_step_off(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    # verl's own search path is a folder relative to a checkout of verl
    overrides = ("hydra.searchpath=[pkg://verl.trainer.config]",)
    folder = tmp_path_factory.mktemp("one-step-off")
    return of_experimental("one_step_off_policy.main_ppo", overrides, tiny_model("qwen2"), folder)


@pytest.fixture(scope="module")
def fully_async(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    overrides = (
        "rollout.n=2",
        "rollout.total_rollout_steps=12",  # prompts, of which a step takes four
        "data.train_batch_size=0",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0.5",
    )
    folder = tmp_path_factory.mktemp("fully-async")
    return of_experimental("fully_async_policy.fully_async_main", overrides, tiny_model("qwen2"), folder)


def synced(run: Run, versions: list[int]) -> None:
    """The plugin has moved the weights of every version, all of them, and the engine held what was sent."""
    for name in ("SeparateTrainer", "SeparateRollout"):
        found = [report for report in run.reports if report["manager"] == name]
        assert [report["global_steps"] for report in found] == versions, run.reports
    for number, report in enumerate(each for each in run.reports if each["manager"] == "SeparateRollout"):
        assert report["coverage_expected"] > 10 and report["coverage_missing"] == 0, report
        assert report["replayed_tensors"] == report["tensors"], report
        assert report["verified_tensors"] == (report["tensors"] if number < 3 else 0), report
        assert report["gathered_bytes"] == 0 < report["own_bytes"] + report["peer_bytes"], report
    assert run.matching("replica 0 is ours"), run.tail
    assert run.matching(r"rollout rank 1: engine rank 0 of 1, separate from the trainer"), run.tail
    assert not run.matching("stock verl moves the weights|stock loading"), run.tail


def test_one_step_off_is_synced_before_the_first_step_and_in_each(one_step_off: Run) -> None:
    checks.reached(one_step_off, steps=3)
    synced(one_step_off, [0, 1, 2, 3])


def test_one_step_off_logs_what_each_sync_cost(one_step_off: Run) -> None:
    for step in (1, 2, 3):
        for metrics in (one_step_off.logged[step], one_step_off.printed[step]):
            assert metrics["sync/active"] == 1 and metrics["sync/weight_version"] == step, metrics
            assert metrics["timing_s/sync/phase"] > 0 < metrics["sync/bytes"], metrics


def test_fully_async_is_synced_before_the_first_step_and_after_each(fully_async: Run) -> None:
    assert fully_async.returncode == 0 and not fully_async.timed_out, fully_async.tail
    assert not fully_async.leftovers, fully_async.leftovers
    for step in (1, 2, 3):
        assert fully_async.matching(rf"FullyAsyncTrainer\] global_steps: {step} "), fully_async.tail
    synced(fully_async, [0, 1, 2, 3])
