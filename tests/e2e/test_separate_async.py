# SPDX-License-Identifier: Apache-2.0
"""Covers engines that share no GPU with the trainer: of ``separate_async``, ``one_step_off`` and ``fully_async``."""

import re

import pytest

from e2e import checks
from e2e.runs import ROLLOUT, SHORT_WAIT, Play, Run
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

COMMON = ("+sync=separate", "trainer.v1.separate_async.parameter_sync_step=1", f"{ROLLOUT}.nnodes=1", SHORT_WAIT)
LONG = 900  # tokens of every response; a batch of them takes longer than a step
EVERY = [0, 1, 2, 3]  # versions of three steps


def synced(run: Run, versions: list[int]) -> None:
    """Checks that every version was moved whole and held by the engines; ``versions`` are in the reports' order."""
    assert run.reports, run.tail
    for name, expected in (("SeparateTrainer", EVERY), ("SeparateRollout", versions)):
        found = [report for report in run.reports if report["manager"] == name]
        assert [report["global_steps"] for report in found] == expected, run.reports
    for report in found:
        assert report["coverage_expected"] > 10 and report["coverage_missing"] == 0, report
        assert report["replayed_tensors"] == report["tensors"] > 0, report
        assert report["delivery"] in ("staged", "in place"), report
    assert not run.matching("stock verl moves the weights|stock loading"), run.tail


def test_every_engine_is_synced_and_a_replica_that_dies_costs_that_sync_alone(play: Play) -> None:
    """Has a scheduler of one of two separate replicas die after the second step, next to a colocated engine."""
    gpus = f"{ROLLOUT}.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=3"
    separate = play(*COMMON, *gpus, steps=3, change="dying_engine")
    checks.reached(separate, steps=3)
    for rank in (1, 2):
        assert separate.matching(rf"rollout rank {rank}: engine rank 0 of 1, separate from the trainer"), separate.tail
    for replica in (0, 1, 2):
        assert separate.matching(rf"task runner: replica {replica} is ours"), separate.tail
    synced(separate, [0, 0, 1, 1, 2, 3])  # one replica of two is there since the second step
    colocated = [report for report in separate.reports if report["manager"] == "FSDP2SGLangShardingManager"]
    assert colocated and all(report["coverage_missing"] == 0 for report in colocated), separate.reports
    assert separate.matching(r"rollout server: .*, [1-9]\d* processes of SGLang"), separate.tail
    assert separate.matching(r"driver: replica 2 of the separate rollout has died; 1 go on without it"), separate.tail
    costs_are_logged(separate)


def costs_are_logged(run: Run) -> None:
    for step in (1, 2, 3):
        metrics = run.logged[step]
        assert metrics["sync/active"] == 1 and metrics["sync/weight_version"] == step, metrics
        assert metrics["timing_s/sync/phase"] > 0 < metrics["sync/bytes"], metrics


@pytest.mark.extended
def test_a_megatron_trainer_syncs_the_separate_engine(play: Play) -> None:
    """Three steps of two tensor-parallel ranks of Megatron, an engine on their GPUs and one on GPUs of its own."""
    on_policy = "trainer.v1.separate_async.num_warmup_batches=0"  # answers are of the version that the trainer holds
    gpus = f"{ROLLOUT}.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=4"
    megatron = play(*COMMON, on_policy, *gpus, ranks=2, steps=3, megatron=(2, 1, 1))
    checks.reached(megatron, steps=3)
    synced(megatron, EVERY)
    assert any(report["manager"] == "MegatronSGLangShardingManager" for report in megatron.reports), megatron.reports
    costs_are_logged(megatron)
    checks.same_weights(megatron)


@pytest.mark.extended  # of the same without verl's trainer: tests/contract/test_pause_modes.py
def test_responses_span_the_syncs_of_an_engine_that_keeps_its_requests(play: Play) -> None:
    """Three steps with requests that stay in the separate engine while it is synced; all responses are long."""
    overrides = (
        *(*COMMON, f"{ROLLOUT}.custom.sync.pause=retract", f"{ROLLOUT}.n_gpus_per_node=1"),
        *("++ray_kwargs.ray_init.num_gpus=2", f"data.max_response_length={LONG}"),
        f"{ROLLOUT}.max_num_seqs=8",  # one batch, so the next one is in flight whenever a step has its own
        "trainer.v1.separate_async.num_warmup_batches=2",
    )
    spanning = play(*overrides, steps=3, change="noting_pauses")
    checks.reached(spanning, steps=3)
    assert spanning.matching(rf"rollout server: {re.escape(FORGETTING_LOADER)}, "), spanning.tail
    synced(spanning, EVERY)
    assert len(spanning.matching(r"\[e2e\] paused by a driver, 0 requests stayed")) == 1, spanning.tail
    loads = spanning.matching(r"\[e2e\] paused by its load, \d+ requests stayed")
    stayed = [line for line in loads if " 0 requests" not in line.text]
    assert len(loads) == 3 and stayed, "the sync after each step pauses by itself, with requests in flight"
    spans = [spanning.logged[step]["training/off_policy/trajectory_spans/max"] for step in (1, 2, 3)]
    assert max(spans) >= 2, f"no response spans a sync: {spans}"


EXPERIMENTAL = (
    *(f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin", "rollout.nnodes=1", "rollout.n_gpus_per_node=1"),
    *("actor_rollout_ref.hybrid_engine=False", SHORT_WAIT, "++ray_kwargs.ray_init.num_gpus=2"),
    "ray_kwargs.ray_init.num_cpus=64",  # their actors ask for ten each
)


def of_experimental(main: str, overrides: tuple[str, ...], play: Play) -> Run:
    """Three steps of one trainer rank and a replica with a GPU of its own."""
    run = play(*EXPERIMENTAL, *overrides, steps=3, main=f"verl.experimental.{main}")
    synced(run, EVERY)
    of_engine = [report for report in run.reports if report["manager"] == "SeparateRollout"]
    assert [report["verified_tensors"] for report in of_engine] == [of_engine[0]["tensors"]] * 3 + [0], of_engine
    assert run.matching("replica 0 is ours"), run.tail
    assert run.matching(r"rollout rank 1: engine rank 0 of 1, separate from the trainer"), run.tail
    return run


@pytest.mark.extended
def test_one_step_off_is_synced_in_every_step_and_logs_what_that_cost(play: Play) -> None:
    # verl's own search path is a folder relative to a checkout of verl
    overrides = ("hydra.searchpath=[pkg://verl.trainer.config]",)
    run = of_experimental("one_step_off_policy.main_ppo", overrides, play)
    checks.reached(run, steps=3)
    costs_are_logged(run)


@pytest.mark.extended
def test_fully_async_is_synced_before_the_first_step_and_after_each(play: Play) -> None:
    overrides = (
        *("rollout.n=2", "rollout.total_rollout_steps=12"),  # prompts, of which a step takes four
        *("data.train_batch_size=0", "async_training.trigger_parameter_sync_step=1"),
        "async_training.staleness_threshold=0.5",
    )
    run = of_experimental("fully_async_policy.fully_async_main", overrides, play)
    assert run.returncode == 0 and not run.leftovers, (run.tail, run.leftovers)
    for step in (1, 2, 3):
        assert run.matching(rf"FullyAsyncTrainer\] global_steps: {step} "), run.tail
