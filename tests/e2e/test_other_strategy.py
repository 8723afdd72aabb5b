# SPDX-License-Identifier: Apache-2.0
"""Runs that the plugin cannot serve (a trainer whose strategy no sharding manager knows, a rollout in fp8): with the
plugin installed they run as without, and one line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_models
from e2e import checks
from e2e.runs import Run, Setup, main_ppo

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

ROLLOUT = "actor_rollout_ref.rollout"
# The quickstart gives this key of the plugin, and load_format=auto; with verl's default the engine starts with random
# weights, so only a sync can make it sample like the trainer
AS_STOCK = (f"{ROLLOUT}.update_weights_bucket_megabytes=null", f"{ROLLOUT}.load_format=dummy")


def stock_ran(run: Run, cause: str) -> None:
    """verl's own code moved the weights in every process, and the driver said why."""
    checks.reached(run, steps=1)
    said = run.matching(rf"driver: weight sync NOT IN USE, stock verl moves the weights\. .*{cause}")
    assert len(said) == 1, run.tail
    assert run.matching(r"\(SGLangHttpServer pid=\d+\)") and not run.reports
    for ours in ("SyncSGLangHttpServer", "is ours", "loader active", checks.OUR_WORKER, "sharding manager FSDP"):
        assert ours not in run.text, ours


def test_another_strategy(tmp_path: Path) -> None:
    overrides = ("actor_rollout_ref.actor.strategy=fsdp_turbo", *AS_STOCK)
    run = main_ppo(Setup(overrides, modules=("e2e.plain_engine",)), tmp_path)
    stock_ran(run, r"actor\.strategy=fsdp_turbo")
    checks.same_weights(run)


def test_a_rollout_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl quantizes, sends and serves; only the product with fp8 weights is a stand-in, for want of a GPU."""
    monkeypatch.setenv("VERL_DISABLE_TRITON_FP8", "1")
    # SGLang shares out whole blocks of 128
    model = tiny_models.write("qwen2", tmp_path / "model", hidden_size=256, intermediate_size=512)
    setup = Setup(
        (f"{ROLLOUT}.quantization=fp8", *AS_STOCK), model=model, path=(str(Path(__file__).parent / "fp8_on_cpu"),)
    )
    run = main_ppo(setup, tmp_path)
    stock_ran(run, r"rollout\.quantization='fp8': weight sync sends plain weights\.$")
    metrics = run.logged[1]
    # Measured with fp8: 0.985; with random weights 0.12
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.95, metrics
