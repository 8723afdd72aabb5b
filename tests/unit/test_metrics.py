# SPDX-License-Identifier: Apache-2.0
"""Reports of a sync and what they become in verl's metrics."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_sync_plugin.report import notice
from verl_sync_plugin.report.metrics import metrics_of, timing_of
from verl_sync_plugin.report.sync_report import PHASE_STAGES, SyncReport, peak_resident_bytes


def report(**changes: Any) -> SyncReport:
    stages = {"sleep": 0.5, "resume_weights": 0.25, "update_weights": 2.0, "resume_kv": 0.125, "pack": 9.0}
    values: dict[str, Any] = {"global_steps": 3, "stages": stages, "nbytes": 4_000_000_000, "buckets": 2, "tensors": 7}
    return SyncReport(**(values | changes))


def test_stage_adds_up_even_when_it_fails() -> None:
    measured = SyncReport()
    for _ in range(2):
        with measured.stage("pack"):
            time.sleep(0.01)
    with pytest.raises(RuntimeError), measured.stage("gather"):
        time.sleep(0.01)
        raise RuntimeError
    assert 0.02 <= measured.stages["pack"] < 0.5
    assert 0.01 <= measured.stages["gather"] < 0.5


def test_phase_counts_its_stages_and_no_details() -> None:
    assert report().phase_seconds == 2.875
    assert set(report().stages) - set(PHASE_STAGES) == {"pack"}
    around = {"before": 1.0, "offload": 2.0, "after": 4.0, "barrier": 8.0}
    assert report(stages={**report().stages, **around}).phase_seconds == 17.875
    assert SyncReport().phase_seconds == 0.0


def test_releases_add_up() -> None:
    measured = SyncReport()
    for released in (None, 7, 0):
        measured.note_release(released)
    assert (measured.emptied_caches, measured.released_bytes) == (2, 7)


def test_rate() -> None:
    assert report().gigabytes_per_second == 2.0
    assert SyncReport(nbytes=5).gigabytes_per_second == 0.0


def test_line_has_what_an_operator_looks_for() -> None:
    line = report(
        bucket_bytes=64 << 20,
        emptied_caches=2,
        released_bytes=9 << 20,
        peak_device_bytes=3 << 20,
        peak_host_bytes=5 << 20,
    ).line()
    for part in (
        "sync of step 3:",
        "phase=2.8750s",
        "update_weights=2.0000s",
        "4.000GB",
        "2.00GB/s",
        "buckets=2 of=64MiB",
        "emptied_caches=2",
        "released=9MiB",
        "tensors=7",
        "peak_device=3MiB",
        "peak_host=5MiB",
    ):
        assert part in line


def test_line_of_a_verified_sync_says_how_much_was_compared() -> None:
    assert "verified=" not in report().line(), "nothing was looked at"
    assert report(verified_tensors=5, not_comparable=2).line().endswith(" verified=5 not_comparable=2")
    crowded = report(not_comparable=7, no_room="beside rank 1: full").line()
    assert crowded.endswith(" verified=0 not_comparable=7 (an engine rank had no memory to find out what it holds)")


def test_metrics_tell_the_worst_replica_of_what_was_compared() -> None:
    found = metrics_of([report(verified_tensors=n, not_comparable=7 - n).as_dict() for n in (5, 3)])
    assert (found["sync/verified_tensors"], found["sync/not_comparable"]) == (3.0, 4.0)


def test_report_survives_the_wire() -> None:
    assert SyncReport(**report(device_used_bytes={"asleep": 1}).as_dict()) == report(device_used_bytes={"asleep": 1})


def test_timing_takes_the_slowest_replica() -> None:
    slow = report(stages={"update_weights": 3.0, "resume_kv": 0.5})
    timing = timing_of([report().as_dict(), slow.as_dict()])
    assert timing == {
        "sync/pack": 9.0,
        "sync/resume_kv": 0.5,
        "sync/resume_weights": 0.25,
        "sync/sleep": 0.5,
        "sync/update_weights": 3.0,
        "sync/phase": 3.5,
    }


def test_metrics_sum_bytes_and_take_the_worst_of_the_rest() -> None:
    other = report(nbytes=1_000_000_000, buckets=5, peak_device_bytes=8, peak_host_bytes=9, coverage_expected=11)
    other.replayed_tensors, other.own_bytes, other.peer_bytes, other.gathered_bytes = 7, 3, 2, 1
    other.network_bytes = 4
    other.bucket_bytes, other.emptied_caches, other.released_bytes = 1 << 20, 1, 2 << 20
    assert metrics_of([report().as_dict(), other.as_dict()]) == {
        "sync/active": 1.0,
        "sync/bytes": 5e9,
        "sync/gigabytes_per_second": 0.5,
        "sync/buckets": 5.0,
        "sync/bucket_bytes": 1048576.0,
        "sync/emptied_caches": 1.0,
        "sync/released_bytes": 2097152.0,
        "sync/tensors": 7.0,
        "sync/peak_device_bytes": 8.0,
        "sync/peak_host_bytes": 9.0,
        "sync/coverage_expected": 11.0,
        "sync/coverage_missing": 0.0,
        "sync/own_bytes": 3.0,
        "sync/peer_bytes": 2.0,
        "sync/gathered_bytes": 1.0,
        "sync/network_bytes": 4.0,
        "sync/direct_bytes": 0.0,
        "sync/activation_bytes": 0.0,
        "sync/verified_tensors": 0.0,
        "sync/not_comparable": 0.0,
        "sync/replayed_tensors": 0.0,
        "sync/weight_version": 3.0,
    }


def test_peak_resident_is_in_bytes() -> None:
    assert 10 << 20 < peak_resident_bytes() < 1 << 40


def test_one_line_says_who_moves_the_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notice, "_said_who", False)
    for steps in (0, 1):
        notice.say_who_moves(report(global_steps=steps, manager="SomeManager", delivery="sharded", nbytes=3 << 29))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[verl-sync-plugin] ")
    assert line.endswith("moves the weights of this run: SomeManager, delivery sharded, 7 tensors, 1.50 GiB")


def test_active_in_every_step_of_a_run_that_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step without a sync, as verl's separate trainers have them, and never without a replica of ours."""
    from verl_sync_plugin.hooks import trainer

    class Steps:
        def on_step_end(self) -> None:
            self._pending_sync_metrics = {"theirs": 2.0}

    ours, stock = SimpleNamespace(syncs_weights=True), SimpleNamespace()
    stepped: Any = trainer.reporting(Steps)()
    stepped.timing_raw = {}
    pending: list[dict[str, Any]] = []
    monkeypatch.setattr(trainer, "take_reports", lambda replicas: list(pending) if replicas == [ours] else 1 / 0)
    for replicas, expected in (([stock], {"theirs": 2.0}), ([stock, ours], {"theirs": 2.0, "sync/active": 1.0})):
        stepped.checkpoint_manager = SimpleNamespace(replicas=replicas)
        stepped.on_step_end()
        assert stepped._pending_sync_metrics == expected and not stepped.timing_raw
    pending.append(report().as_dict())
    stepped.on_step_end()
    assert stepped._pending_sync_metrics["sync/active"] == 1.0 and stepped._pending_sync_metrics["sync/tensors"] == 7.0
    assert stepped.timing_raw["sync/phase"] == 2.875


def test_a_difference_of_probabilities_beyond_the_key_stops_the_run() -> None:
    """Before verl's update of the actor, with step, value and key; never where the key is off or there is no token."""
    from verl_sync_plugin.hooks import trainer

    class Steps:
        global_steps = 7

        def _compute_old_log_prob(self, batch: str, metrics: dict[str, Any]) -> str:
            metrics.update(self.computed)  # type: ignore[attr-defined]
            return batch + " scored"

    stepped: Any = trainer.reporting(Steps)()

    def step(most: float | None, mean: float | None, valid: int = 1) -> None:
        sync = {} if most is None else {"max_probs_diff": most}
        stepped.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {"sync": sync}}}})
        stepped.computed = {} if mean is None else {trainer.PROBS_DIFF: mean, trainer.PROBS_VALID: valid}
        assert stepped._compute_old_log_prob("batch", metrics={}) == "batch scored"

    step(None, 0.9)
    step(0.02, 0.02)
    step(0.02, math.nan, valid=0)
    for mean in (0.021, math.nan):
        with pytest.raises(RuntimeError, match=rf"step 7: {trainer.PROBS_DIFF}={mean} .*\.max_probs_diff=0.02.*raise"):
            step(0.02, mean)
    with pytest.raises(RuntimeError, match=f"step 7: verl logged no {trainer.PROBS_DIFF}, which .*max_probs_diff=0.02"):
        step(0.02, None)
