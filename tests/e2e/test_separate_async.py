# SPDX-License-Identifier: Apache-2.0
"""verl's ``separate_async`` trainer in ``main_ppo``: engines on the trainer's GPUs and one that shares none with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import DUMMY, ROLLOUT, SHORT_WAIT, SMALL_BUCKETS, Run, Setup, main_ppo
from verl_sync_plugin.rollouts.sglang.request import FORGETTING_LOADER, LOADER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

COMMON = (
    "+sync=separate",
    "trainer.v1.separate_async.parameter_sync_step=1",
    f"{ROLLOUT}.nnodes=1",
    DUMMY,
    SMALL_BUCKETS,
    SHORT_WAIT,
)
LONG = 900  # tokens of every response; a batch of them takes longer than a step
# the versions that each side reports: two replicas, and one of them since the second step
SEPARATE = {"SeparateTrainer": [0, 1, 2, 3], "SeparateRollout": [0, 0, 1, 1, 2, 3]}


@pytest.fixture(
    scope="module", params=["e2e.dying_replica", pytest.param("e2e.dying_engine", marks=pytest.mark.extended)]
)
def separate(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Three steps of two trainer ranks, each of which shares its GPU with an engine, and of two replicas with GPUs of
    their own. Of one of these a process dies in the sync behind the second step: verl's beside the engine, or a
    scheduler of SGLang's."""
    overrides = (*COMMON, f"{ROLLOUT}.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=4")
    setup = Setup(overrides, 2, 3, Path(tiny_model("qwen2")), modules=(request.param,), replicas=2)
    return main_ppo(setup, tmp_path_factory.mktemp("separate"))


def test_the_run_reaches_its_steps(separate: Run) -> None:
    checks.reached(separate, steps=3)
    for rank in (2, 3):
        assert separate.matching(rf"rollout rank {rank}: engine rank 0 of 1, separate from the trainer"), separate.tail
    for replica in (0, 1, 2, 3):
        assert separate.matching(rf"task runner: replica {replica} is ours"), separate.tail
    assert not separate.matching("stock verl moves the weights|stock loading"), separate.tail


def test_the_separate_engine_is_synced_before_the_first_step_and_after_each(separate: Run) -> None:
    for name, versions in SEPARATE.items():
        found = [report for report in separate.reports if report["manager"] == name]
        assert [report["global_steps"] for report in found] == versions, separate.reports
    for report in separate.reports:
        if report["manager"] == "SeparateRollout":
            assert report["coverage_expected"] > 10 and report["coverage_missing"] == 0, report
            assert report["replayed_tensors"] == report["tensors"] > 0, report
            assert report["gathered_bytes"] == 0 < report["own_bytes"] + report["peer_bytes"], report


def test_a_replica_that_dies_in_a_sync_costs_that_sync_alone(separate: Run) -> None:
    assert separate.matching(r"rollout server: .*, [1-9]\d* processes of SGLang"), separate.tail
    assert separate.matching(r"driver: replica 3 of the separate rollout has died; 1 go on without it"), separate.tail


def test_verl_logs_what_the_sync_cost(separate: Run) -> None:
    for step in (1, 2, 3):
        assert separate.logged[step]["sync/weight_version"] == step, separate.logged[step]
        assert separate.logged[step]["timing_s/sync/phase"] > 0


def test_engines_on_the_trainers_gpus_are_synced_as_ever(separate: Run) -> None:
    colocated = [report for report in separate.reports if report["manager"] == "FSDP2SGLangShardingManager"]
    assert colocated and all(report["coverage_missing"] == 0 for report in colocated), separate.reports


@pytest.fixture(scope="module")
def megatron(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of two tensor-parallel ranks of Megatron, an engine on their GPUs and one on GPUs of its own."""
    on_policy = "trainer.v1.separate_async.num_warmup_batches=0"  # answers are of the version that the trainer holds
    overrides = (*COMMON, on_policy, f"{ROLLOUT}.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=4")
    setup = Setup(overrides, 2, 3, even_model, megatron=(2, 1, 1))
    return main_ppo(setup, tmp_path_factory.mktemp("megatron"))


@pytest.mark.extended
def test_a_megatron_trainer_syncs_the_separate_engine(megatron: Run) -> None:
    checks.reached(megatron, steps=3)
    assert not megatron.matching("stock verl moves the weights|stock loading"), megatron.tail
    for name in ("SeparateTrainer", "SeparateRollout"):
        found = [report for report in megatron.reports if report["manager"] == name]
        assert [report["global_steps"] for report in found] == [0, 1, 2, 3], megatron.reports
        assert all(report["coverage_missing"] == 0 < report["hashed_tensors"] for report in found), found
    assert any(report["manager"] == "MegatronSGLangShardingManager" for report in megatron.reports), megatron.reports
    for step in (1, 2, 3):
        assert megatron.logged[step]["sync/weight_version"] == step, megatron.logged[step]
    checks.same_weights(megatron)


@pytest.fixture(scope="module", params=["retract", "in_place"])
def spanning(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Three steps with requests that stay in the separate engine while it is synced; all responses are long."""
    overrides = (
        *COMMON,
        f"{ROLLOUT}.custom.sync.pause={request.param}",
        f"{ROLLOUT}.n_gpus_per_node=1",
        "++ray_kwargs.ray_init.num_gpus=2",
        f"data.max_response_length={LONG}",
        f"{ROLLOUT}.max_num_seqs=8",  # one batch, so the next one is in flight whenever a step has its own
        "trainer.v1.separate_async.num_warmup_batches=2",
    )
    setup = Setup(overrides, 1, 3, Path(tiny_model("qwen2")), modules=("e2e.noting_pauses",))
    return main_ppo(setup, tmp_path_factory.mktemp(request.param))


@pytest.mark.extended  # of the same without verl's trainer: tests/contract/test_pause_modes.py
def test_responses_span_the_syncs_of_an_engine_that_keeps_its_requests(
    spanning: Run, request: pytest.FixtureRequest
) -> None:
    checks.reached(spanning, steps=3)
    pause = request.node.callspec.params["spanning"]
    loader = FORGETTING_LOADER if pause == "retract" else LOADER
    assert spanning.matching(rf"rollout server: {re.escape(loader)}, "), spanning.tail
    assert not spanning.matching("stock verl moves the weights|stock loading"), spanning.tail
    for name in ("SeparateTrainer", "SeparateRollout"):
        found = [report for report in spanning.reports if report["manager"] == name]
        assert [report["global_steps"] for report in found] == [0, 1, 2, 3], spanning.reports
        assert all(report["coverage_missing"] == 0 for report in found), spanning.reports
    assert len(spanning.matching(rf"test: {pause} by a driver, 0 requests stayed")) == 1, spanning.tail
    loads = spanning.matching(rf"test: {pause} by its load, \d+ requests stayed")
    stayed = [line for line in loads if " 0 requests" not in line.text]
    assert len(loads) == 3 and stayed, "the sync behind each step pauses by itself, with requests in flight"
    spans = [spanning.logged[step]["training/off_policy/trajectory_spans/max"] for step in (1, 2, 3)]
    assert max(spans) >= 2, f"no response spans a sync: {spans}"
