# SPDX-License-Identifier: Apache-2.0
"""Two rollout engines that keep their memory (``free_cache_engine=False``), beside an FSDP1 trainer of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
FSDP1 = "actor_rollout_ref.actor.strategy=fsdp"
AWAKE = "+sync=colocated_resident"
DUMMY = f"{ROLLOUT}.load_format=dummy"
SMALL_BUCKETS = f"{ROLLOUT}.update_weights_bucket_megabytes=1"


@pytest.fixture(scope="session")
def awake(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs of two engines."""
    overrides = (FSDP1, AWAKE, DUMMY, SMALL_BUCKETS)
    setup = Setup(overrides, 2, 2, Path(tiny_model("qwen2")), replicas=2)
    return main_ppo(setup, tmp_path_factory.mktemp("awake"))


def test_both_engines_have_the_weights_of_the_trainer_at_every_step(awake: Run) -> None:
    checks.reached(awake, steps=2)
    checks.same_weights(awake)
    for replica in (0, 1):
        assert awake.matching(rf"task runner: replica {replica} is ours"), awake.tail
    assert len(awake.matching(r"\[verl-sync-plugin\] pid \d+ loader active, rank 0 of Qwen2ForCausalLM")) == 2, (
        awake.tail
    )
    assert {report["manager"] for report in awake.reports} == {"FSDPSGLangShardingManager"}


def test_each_engine_is_synced_once_a_step_and_nothing_is_resumed(awake: Run) -> None:
    steps = [report["global_steps"] for report in awake.reports]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2], steps
    for report in awake.reports:
        assert report["stages"]["sleep"] == 0 and "resume_weights" not in report["stages"], report
        assert report["replayed_tensors"] == report["tensors"] > 0, report
        # Every engine holds the whole model, of which each trainer rank packs a half
        assert report["own_bytes"] == report["peer_bytes"] == report["nbytes"] // 2, report


def test_bytes_of_both_engines_are_counted(awake: Run) -> None:
    for step in (1, 2):
        both = [report["nbytes"] for report in awake.reports if report["global_steps"] == step]
        assert awake.logged[step]["sync/bytes"] == sum(both)
