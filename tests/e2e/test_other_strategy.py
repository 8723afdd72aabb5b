# SPDX-License-Identifier: Apache-2.0
"""A trainer whose strategy no sharding manager knows: with the plugin installed it runs as without, and is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
# verl's default: the engine starts with random weights, so only a sync can make it sample like the trainer
OVERRIDES = (
    "actor_rollout_ref.actor.strategy=fsdp_turbo",
    f"{ROLLOUT}.update_weights_bucket_megabytes=null",  # the quickstart asks for it
    f"{ROLLOUT}.load_format=dummy",
)


def test_it_runs_on_stock_verl_in_every_process(tmp_path: Path) -> None:
    run = main_ppo(Setup(OVERRIDES, modules=("e2e.plain_engine",)), tmp_path)
    checks.reached(run, steps=1)
    checks.same_weights(run)
    said = run.matching(r"driver: weight sync NOT IN USE, stock verl moves the weights\. .*actor\.strategy=fsdp_turbo")
    assert len(said) == 1, run.tail
    assert run.matching(r"\(SGLangHttpServer pid=\d+\)") and not run.reports
    for ours in ("SyncSGLangHttpServer", "is ours", "loader active", checks.OUR_WORKER, "sharding manager FSDP"):
        assert ours not in run.text, ours
