# SPDX-License-Identifier: Apache-2.0
"""verl's legacy trainer (``trainer.use_v1=False``), whose task runner resolves the config before it loads plugins.

The model is a Mixtral, whose trainer holds other tensors than its checkpoint: stock verl sends the router and all
experts under names that SGLang skips. Embedding and head are tied, and SGLang's class has a head of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
# verl's default: the engine starts with random weights, so only a sync can make it sample like the trainer
LEGACY = ("trainer.use_v1=False", f"{ROLLOUT}.load_format=dummy", f"{ROLLOUT}.update_weights_bucket_megabytes=1")


@pytest.fixture(scope="module")
def trained(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs."""
    setup = Setup(LEGACY, steps=2, model=Path(tiny_model("mixtral-tied")))
    return main_ppo(setup, tmp_path_factory.mktemp("legacy"))


def test_the_plugin_moves_its_weights(trained: Run) -> None:
    checks.reached(trained, steps=2)
    checks.same_weights(trained)
    assert trained.matching("Legacy trainer `main_ppo_v0.py` is deprecated"), trained.tail
    assert trained.matching(r"\(WorkerDict pid=\d+\) .*sharding manager FSDP2SGLangShardingManager, buckets of 1 MiB")


def test_its_syncs_are_reported_beside_its_metrics(trained: Run) -> None:
    checks.reported(trained, steps=2)
    assert len(trained.matching(r"\(TaskRunner pid=\d+\) .*NO SYNC METRICS: .*legacy trainer")) == 1, trained.tail
    for step in (0, 1, 2):
        assert trained.matching(rf"\(WorkerDict pid=\d+\) .*sync of step {step}: [0-9.]+ s, "), trained.tail
    for metrics in trained.logged.values():
        assert not [name for name in metrics if "sync/" in name], (
            "verl's legacy trainer has learned to log them: say so"
        )


def test_every_parameter_of_mixtral_is_written_and_replayed(trained: Run) -> None:
    assert len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["coverage_missing"] == 0 and report["tensors"] > 24, report
    assert trained.reports[-1]["replayed_tensors"] == trained.reports[-1]["tensors"], trained.reports


def test_switched_off_it_is_stock_verl(tmp_path: Path) -> None:
    stock = main_ppo(Setup((*LEGACY, f"{ROLLOUT}.custom.sync.enabled=False")), tmp_path)
    checks.reached(stock, steps=1)
    checks.same_weights(stock)
    assert stock.matching(r"\(SGLangHttpServer pid=\d+\)") and not stock.reports
    assert "SyncSGLangHttpServer" not in stock.text and "is ours" not in stock.text
