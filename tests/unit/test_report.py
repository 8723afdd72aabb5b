# SPDX-License-Identifier: Apache-2.0
"""Checks what a sync reports: its line, verl's metrics, lines that are said once or while it lasts, and the guard on
verl's difference of probabilities."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_sync_plugin import report as module
from verl_sync_plugin.hooks import trainer
from verl_sync_plugin.layout.planner import plan_buckets
from verl_sync_plugin.layout.tensors import Base, View
from verl_sync_plugin.report import (
    MAX_SPANS,
    PHASE_STAGES,
    SyncReport,
    metrics_of,
    progress,
    progress_line,
    timing_of,
)
from verl_sync_plugin.transport.protocol import ALL


def report(**changes: Any) -> SyncReport:
    stages = {"sleep": 0.5, "resume_weights": 0.25, "update_weights": 2.0, "resume_kv": 0.125, "pack": 9.0}
    values: dict[str, Any] = {"global_steps": 3, "stages": stages, "nbytes": 4_000_000_000, "buckets": 2, "tensors": 7}
    return SyncReport(**(values | changes))


def test_stages_add_up_also_when_they_fail_and_spans_nest_and_are_bounded() -> None:
    measured = SyncReport.begun(1, "M", rank=0)
    for _ in range(2):
        with pytest.raises(RuntimeError), measured.stage("update_weights"), measured.stage("pack"):
            assert measured.under_way == ["update_weights", "pack"]
            time.sleep(0.01)
            raise RuntimeError
    assert 0.02 <= measured.stages["pack"] <= measured.stages["update_weights"] < 0.5 and measured.under_way == []
    (_, inner, short), (_, outer, long) = measured.spans[:2]
    assert outer <= inner and inner + short <= outer + long + 2e-6
    for _ in range(MAX_SPANS):
        measured.note_stage("load", 0.0, 1.0)
    assert len(measured.spans) == MAX_SPANS and measured.spans_left_out == 4


def test_the_phase_is_the_sum_of_its_stages_and_of_what_came_before() -> None:
    assert report().phase_seconds == 2.875 and SyncReport().phase_seconds == 0.0
    assert set(report().stages) - set(PHASE_STAGES) == {"pack"}
    later, around = report(), SyncReport()
    for name, seconds in (("before", 1.0), ("update_weights", 2.0), ("offload", 4.0)):
        around.note_stage(name, 0.0, seconds)
    later.put_before(around)
    assert later.phase_seconds == 9.875 and later.stages["update_weights"] == 4.0
    assert [name for name, *_ in later.spans] == ["before", "update_weights", "offload"]
    assert SyncReport(**later.as_dict()) == later, "it survives the wire"


def test_the_line_fits_a_terminal() -> None:
    assert report(delivery="direct", hashed_tensors=7).line() == (
        "sync of step 3: 2.875 s, 7 tensors, 4.00 GB, direct, hashed 7"
    )
    adapter = report(nbytes=230_000, tensors=0)
    assert adapter.line() == "sync of step 3: 2.875 s, 0 tensors, 0.23 MB, the adapter alone, hashed 0"
    longest = report(
        global_steps=10000,
        tensors=18867,
        nbytes=61 * 10**9,
        delivery="broadcast",
        verified_tensors=18867,
        no_room="all",
    )
    assert longest.line().endswith("GB, broadcast, verified 18867, no memory to verify") and len(longest.line()) <= 100
    assert report(verified_tensors=5, not_comparable=2).line().endswith("verified 5, 2 not comparable")


def test_of_several_replicas_bytes_add_up_and_the_worst_of_the_rest_counts() -> None:
    slow = report(stages={"update_weights": 3.0, "resume_kv": 0.5})
    assert timing_of([report().as_dict(), slow.as_dict()]) == {
        "sync/pack": 9.0, "sync/resume_kv": 0.5, "sync/resume_weights": 0.25, "sync/sleep": 0.5,
        "sync/update_weights": 3.0, "sync/phase": 3.5,
    }  # fmt: skip
    other = report(nbytes=1_000_000_000, buckets=5, peak_device_bytes=8, own_bytes=3, network_bytes=4, bucket_bytes=6)
    one = report(own_bytes=1, verified_tensors=5, not_comparable=2, replayed_tensors=7, coverage_expected=11)
    found = metrics_of([one.as_dict(), other.as_dict()])
    expected = {
        "active": 1, "bytes": 5e9, "gigabytes_per_second": 0.5, "buckets": 5, "bucket_bytes": 6, "tensors": 7,
        "peak_device_bytes": 8, "coverage_expected": 11, "own_bytes": 4, "network_bytes": 4, "verified_tensors": 0,
        "not_comparable": 2, "replayed_tensors": 0, "weight_version": 3,
    }  # fmt: skip
    assert {name: found[f"sync/{name}"] for name in expected} == expected
    zeros = set(found) - {f"sync/{name}" for name in expected}
    assert len(zeros) == 8 and not any(found[name] for name in zeros), zeros


def test_a_sync_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bases = tuple(Base(f"w{i}", "uint8", 1, (10**7,), (View(f"w{i}", (10**7,), 0, 10**7),)) for i in range(4))
    plan, measured = plan_buckets(bases, 10**7), SyncReport.begun(3, "M", rank=0)
    assert progress_line(measured, 6.2) == "sync of step 3: 6 s so far, no bucket handed over yet"
    measured.handed_over = (plan, ALL)
    assert "bucket 4 of 4, 0.04 of 0.04 GB" in progress_line(measured, 11.0)
    measured.handed_over = (plan, 0)
    assert module.EVERY_SECONDS == 5.0
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.15)
    for speaks, seconds, most in ((True, 0.0, 0), (False, 0.4, 0), (True, 0.55, 4)):
        with pytest.raises(RuntimeError), progress(measured, speaks), measured.stage("connect"):
            time.sleep(seconds)
            raise RuntimeError
        said = capsys.readouterr().out.splitlines()
        assert bool(said) == bool(most) and len(said) <= most, said
        assert all("bucket 1 of 4, 0.01 of 0.04 GB, now in connect" in line for line in said)
    assert "sync progress" not in {thread.name for thread in threading.enumerate()}


def test_active_in_every_step_of_a_run_that_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step without a sync, as verl's separate trainers have them, and never without a replica of ours."""

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
    assert stepped._pending_sync_metrics["sync/tensors"] == 7.0 and stepped.timing_raw["sync/phase"] == 2.875


@pytest.mark.parametrize(
    ("most", "mean", "valid", "said"),
    [
        (None, 0.9, 1, ""),
        (0.02, 0.02, 1, ""),
        (0.02, math.nan, 0, ""),  # there is no token
        *(
            (0.02, mean, 1, rf"{trainer.PROBS_DIFF}={mean} .*\.max_probs_diff=0.02.*raise")
            for mean in (0.021, math.nan)
        ),
        (0.02, None, 1, f"verl logged no {trainer.PROBS_DIFF}, which .*max_probs_diff=0.02"),
    ],
)
def test_a_difference_of_probabilities_beyond_the_key_stops_the_run(
    most: float | None, mean: float | None, valid: int, said: str
) -> None:
    """Before verl's update of the actor, with step, value and key."""

    class Steps:
        global_steps = 7
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"custom": {"sync": {"max_probs_diff": most}}}}})

        def _compute_old_log_prob(self, batch: str, metrics: dict[str, Any]) -> str:
            metrics.update({} if mean is None else {trainer.PROBS_DIFF: mean, trainer.PROBS_VALID: valid})
            return batch + " scored"

    stepped: Any = trainer.reporting(Steps)()
    if said:
        with pytest.raises(RuntimeError, match=f"step 7: {said}"):
            stepped._compute_old_log_prob("batch", metrics={})
    else:
        assert stepped._compute_old_log_prob("batch", metrics={}) == "batch scored"
