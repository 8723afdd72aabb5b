# SPDX-License-Identifier: Apache-2.0
"""verl's own ``main_ppo`` with the plugin: real Ray, FSDP2 and SGLang on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import safe_open

from e2e import checks
from e2e.runs import DUMMY, ROLLOUT, SHORT_WAIT, SMALL_BUCKETS, Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

BUCKET_BYTES = 1 << 20
VERIFIED = f"{ROLLOUT}.custom.sync.verify=first"
GUARDED = f"{ROLLOUT}.custom.sync.max_probs_diff=0.005"
RANKS = 2  # one alone: test_other_runs.py


@pytest.fixture(scope="session")
def trained(larger_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs; SGLang refuses the load of the fourth, which ends the run in its third step."""
    overrides = (DUMMY, SMALL_BUCKETS, SHORT_WAIT, VERIFIED, GUARDED)
    setup = Setup(overrides, RANKS, 3, larger_model, change="wrong_shape")
    return main_ppo(setup, tmp_path_factory.mktemp("trained"))


def test_every_process_uses_the_plugin_and_the_engine_has_the_weights_at_every_step(trained: Run) -> None:
    checks.plugin_ran(trained, RANKS)
    assert sorted(trained.logged) == sorted(trained.printed) == [1, 2], trained.tail
    checks.same_weights(trained)
    for step in (1, 2):
        checks.metrics_complete(trained.logged[step], step)
        checks.metrics_complete(trained.printed[step], step)
    checks.reported(trained, steps=2)
    for report in trained.reports:  # the first three, so all
        assert report["verified_tensors"] == report["tensors"] and report["not_comparable"] == 0, report


def test_whole_model_travels_in_buckets_smaller_than_its_tensors(trained: Run, larger_model: Path) -> None:
    with safe_open(larger_model / "model.safetensors", "pt") as checkpoint:
        sizes = {name: checkpoint.get_tensor(name).nbytes for name in checkpoint.keys()}  # noqa: SIM118
    assert max(sizes.values()) > BUCKET_BYTES
    assert len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["tensors"] == len(sizes)
        assert sum(sizes.values()) <= report["nbytes"] <= 1.01 * sum(sizes.values())
        segments = 2 if report["peer_bytes"] else 1  # of a sharded bucket, every rank stages one
        assert report["nbytes"] <= report["buckets"] * BUCKET_BYTES * segments
        assert report["bucket_bytes"] == BUCKET_BYTES
        assert report["coverage_expected"] == 17


def test_an_engine_that_computes_otherwise_stops_the_run(tmp_path: Path) -> None:
    """Kernels and dtypes make a difference of about 1e-4, above so small a bound; ``trained`` keeps to its own."""
    setup = Setup((DUMMY, SMALL_BUCKETS, f"{ROLLOUT}.custom.sync.max_probs_diff=1e-9"), steps=2)
    run = main_ppo(setup, tmp_path)
    assert run.returncode != 0 and not run.timed_out, run.tail
    said = r"step 1: training/rollout_probs_diff_mean=\S+ exceeds \S+\.custom\.sync\.max_probs_diff=1e-09: "
    assert run.matching(said), run.tail
    assert not run.logged and not run.leftovers, run.tail


def test_switched_off_it_is_stock_verl_and_leaves_no_trace(tmp_path: Path) -> None:
    """One step of the model that the quickstart makes for itself."""
    stock = main_ppo(Setup((DUMMY, SMALL_BUCKETS, f"{ROLLOUT}.custom.sync.enabled=False")), tmp_path)
    checks.reached(stock, steps=1)
    checks.same_weights(stock)
    assert stock.matching(r"driver: weight sync off, stock verl moves the weights")
    assert stock.matching(r"\(WorkerDict pid=\d+\) .*custom\.sync\.enabled=False: stock verl moves the weights")
    assert stock.matching(r"\(SGLangHttpServer pid=\d+\)")
    assert "SyncSGLangHttpServer" not in stock.text
    assert checks.OUR_WORKER not in stock.text
    assert "loader active" not in stock.text and "is ours" not in stock.text
    assert not stock.reports
    for metrics in (*stock.logged.values(), *stock.printed.values()):
        assert not [name for name in metrics if name.startswith(("sync/", "timing_s/sync/"))]


def test_a_load_that_the_engine_refuses_ends_the_run(trained: Run) -> None:
    """One engine rank fails in the fourth sync: loud, soon, the same for both trainer ranks, and nobody is left."""
    assert trained.returncode != 0 and not trained.timed_out, trained.tail
    failures = trained.matching(r"\[verl-sync-plugin\] pid \d+ sync 4 \(step 3\)( once more)? failed in the engine")
    assert failures, trained.tail
    assert trained.seconds - failures[0].seconds < 60, trained.tail
    assert [report["global_steps"] for report in trained.reports] == [0, 1, 2], "the fourth sync has succeeded"
    assert max(trained.printed) == max(trained.logged) == 2, "the run went on after the failed sync"
    assert not trained.leftovers, trained.leftovers
    # Every mention of the error is the same text; it names the rank and the cause
    (error,) = {line.text.partition("SyncError: ")[2] for line in trained.matching("SyncError: ")}
    assert re.fullmatch(r"weight sync failed at '[^']+'; trainer weights are unchanged\.", error), trained.tail
    assert trained.matching(r"^rank 0: .*the engine could not load the weights: AssertionError"), trained.tail
