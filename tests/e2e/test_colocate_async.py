# SPDX-License-Identifier: Apache-2.0
"""verl's ``colocate_async`` trainer in ``main_ppo``: one GPU for both, and requests that a sync cuts off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def colocated(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps; a batch more than a step takes is in flight whenever verl aborts."""
    overrides = (
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.update_weights_bucket_megabytes=1",
    )
    setup = Setup(overrides, 1, 3, Path(tiny_model("qwen2")))
    return main_ppo(setup, tmp_path_factory.mktemp("colocate-async"))


def test_every_step_is_synced(colocated: Run) -> None:
    checks.reached(colocated, steps=3)
    checks.plugin_ran(colocated, ranks=1)
    checks.reported(colocated, steps=3)
    for step in (1, 2, 3):
        checks.metrics_complete(colocated.logged[step], step)


def test_answers_go_on_behind_the_sync_that_cut_them_off(colocated: Run) -> None:
    """A step trains on answers that the weights of the step before have begun."""
    found = [colocated.logged[step]["training/off_policy/trajectory_staleness/max"] for step in (1, 2, 3)]
    assert max(found) >= 1, found
