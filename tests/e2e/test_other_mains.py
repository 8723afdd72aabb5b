# SPDX-License-Identifier: Apache-2.0
"""verl's mains whose rollout has GPUs of its own, beside ``separate_async`` in ``main_ppo``: ``one_step_off`` and
``fully_async``.

They make verl's own workers, checkpoint manager and client, so all that is the plugin's is the checkpoint engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"


class Main(NamedTuple):
    """One of verl's mains.

    Attributes:
        module: that is run.
        overrides: what it needs.
    """

    module: str
    overrides: tuple[str, ...]


MAINS = {
    # As it stands, verl finds its own configuration in its source tree only
    "one_step_off": Main("one_step_off_policy.main_ppo", ("hydra.searchpath=[pkg://verl.trainer.config]",)),
    "fully_async": Main(
        "fully_async_policy.fully_async_main",
        (
            "data.train_batch_size=0",
            "data.gen_batch_size=1",
            "rollout.total_rollout_steps=12",  # a step takes four
            "async_training.trigger_parameter_sync_step=1",
        ),
    ),
}


@pytest.fixture(scope="module", params=MAINS.values(), ids=MAINS.keys())
def apart(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Three steps of one trainer rank, and of an engine that starts with random weights."""
    overrides = (
        *request.param.overrides,
        f"{ROLLOUT}.checkpoint_engine.backend=sync_plugin",
        "actor_rollout_ref.hybrid_engine=False",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.update_weights_bucket_megabytes=1",
        f"{ROLLOUT}.custom.sync.timeout_seconds=90",
        "++ray_kwargs.ray_init.num_gpus=2",
        "++ray_kwargs.ray_init.num_cpus=32",
    )
    setup = Setup(overrides, 1, 3, Path(tiny_model("qwen2")), main=f"verl.experimental.{request.param.module}")
    return main_ppo(setup, tmp_path_factory.mktemp("apart"))


def test_it_reaches_its_steps(apart: Run) -> None:
    assert apart.returncode == 0 and not apart.timed_out and not apart.leftovers, apart.tail
    assert {1, 2, 3} <= set(apart.logged), (sorted(apart.logged), sorted(apart.printed))
    assert not apart.matching("stock verl moves the weights|stock loading"), apart.tail


def test_the_engine_is_synced_before_the_first_step_and_after_each(apart: Run) -> None:
    for name in ("SeparateTrainer", "SeparateRollout"):
        found = [report["global_steps"] for report in apart.reports if report["manager"] == name]
        assert len(found) >= 3 and found == sorted(found), apart.reports
    for report in apart.reports:
        if report["manager"] == "SeparateRollout":
            assert report["replayed_tensors"] == report["tensors"] > 0 == report["coverage_missing"], report
