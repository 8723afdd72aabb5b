# SPDX-License-Identifier: Apache-2.0
"""verl's own ``main_ppo`` with the plugin: real Ray, FSDP2 and SGLang on a CPU."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from e2e import checks
from e2e.runs import DUMMY, ROLLOUT, SHORT_WAIT, SMALL_BUCKETS, Play, Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

BUCKET_BYTES = 1 << 20
RANKS = 2  # one alone: test_other_runs.py


@pytest.fixture(scope="module")
def trained(larger_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, so three syncs; SGLang refuses the load of the fourth, which ends the run in its third step."""
    overrides = (DUMMY, SMALL_BUCKETS, SHORT_WAIT, f"{ROLLOUT}.custom.sync.verify=first")
    setup = Setup(overrides, RANKS, 3, larger_model, change="wrong_shape")
    return main_ppo(setup, tmp_path_factory.mktemp("trained"))


def test_every_process_uses_the_plugin_and_the_engine_has_the_weights_at_every_step(trained: Run) -> None:
    checks.ended(trained, steps=2)
    checks.synced(trained, 2, RANKS)
    for report in trained.reports:  # the first three, so all
        assert report["verified_tensors"] == report["tensors"] and report["not_comparable"] == 0, report


def test_whole_model_travels_in_buckets_smaller_than_its_tensors(trained: Run, larger_model: Path) -> None:
    sizes = [tensor.nbytes for tensor in load_file(larger_model / "model.safetensors").values()]
    assert max(sizes) > BUCKET_BYTES and len(trained.reports) == 3, trained.tail
    for report in trained.reports:
        assert report["tensors"] == len(sizes) and report["coverage_expected"] == 17
        assert report["bucket_bytes"] == BUCKET_BYTES
        # Of a sharded bucket, each of two ranks stages one segment
        assert sum(sizes) <= report["nbytes"] <= min(1.01 * sum(sizes), report["buckets"] * BUCKET_BYTES * 2)


def test_a_load_that_the_engine_refuses_ends_the_run(trained: Run) -> None:
    """One engine rank fails in the fourth sync: loud, soon, and the same for both trainer ranks."""
    assert trained.returncode != 0, trained.tail
    failures = trained.matching(r"\[verl-sync-plugin\] pid \d+ sync 4 \(step 3\) of group \w+ failed in the engine")
    assert failures, trained.tail
    assert trained.seconds - failures[0].seconds < 60, trained.tail
    # Every mention of the error is the same text; it names the rank and the cause
    (error,) = {line.text.partition("SyncError: ")[2] for line in trained.matching("SyncError: ")}
    assert re.fullmatch(r"weight sync failed at '[^']+'; trainer weights are unchanged\.", error), trained.tail
    assert trained.matching(r"^rank 0: .*the engine could not load the weights: .*AssertionError"), trained.tail


def test_an_engine_that_computes_otherwise_stops_the_run(drifted: Run) -> None:
    """Kernels and dtypes make a difference of about 1e-4; the fourth step's is that of another model."""
    assert drifted.returncode != 0, drifted.tail
    said = r"step 4: training/rollout_probs_diff_mean=\S+ exceeds \S+\.custom\.sync\.max_probs_diff=0\.001: "
    assert drifted.matching(said), drifted.tail


@pytest.mark.extended  # in the default selection: what each part of verl does then, in tests/unit
def test_switched_off_it_is_stock_verl_and_leaves_no_trace(play: Play) -> None:
    stock = play(f"{ROLLOUT}.custom.sync.enabled=False")
    checks.reached(stock, steps=1)
    checks.same_weights(stock)
    assert stock.matching(r"driver: weight sync off, stock verl moves the weights")
    assert stock.matching(r"\(WorkerDict pid=\d+\) .*custom\.sync\.enabled=False: stock verl moves the weights")
    assert stock.matching(r"\(SGLangHttpServer pid=\d+\)") and not stock.reports
    for ours in ("SyncSGLangHttpServer", "is ours", "loader active", checks.OUR_WORKER, "sharding manager FSDP"):
        assert ours not in stock.text, ours
    assert not [name for name in stock.logged[1] if name.startswith(("sync/", "timing_s/sync/"))]
