# SPDX-License-Identifier: Apache-2.0
"""Checks what a run leaves in which the plugin moved the weights."""

import re
from collections.abc import Mapping
from typing import Any

from e2e.runs import Run
from verl_sync_plugin.rollouts.sglang.request import LOADER

# "before", "offload", "after" and "barrier" are timed by our worker alone, so these show that it ran
STAGES = ("sleep", "before", "resume_weights", "update_weights", "offload", "after", "barrier", "resume_kv", "phase")
PHASE = {f"timing_s/sync/{name}" for name in STAGES}
OUR_WORKER = "SyncActorRolloutRefWorker"
COUNTS = {f"sync/{name}" for name in ("bytes", "buckets", "tensors", "coverage_expected", "weight_version")}

# Measured: bfloat16 noise below 0.001 and above 0.9995; stale weights 0.034 and 0.35, random ones 0.017 and 0.12
MOST_DIFFERENCE = 5e-3
LEAST_CORRELATION = 0.99


def reached(run: Run, steps: int) -> None:
    """The run ended well after exactly these steps."""
    assert run.returncode == 0, run.tail
    ended(run, steps)


def ended(run: Run, steps: int) -> None:
    """The run ended after these steps, and no process of it is left."""
    assert list(run.logged) == list(range(1, steps + 1)), run.tail
    assert not run.leftovers, run.leftovers


def same_weights(run: Run) -> None:
    """The engine samples with the probabilities that the trainer computes, at every step, while the trainer learns."""
    for step, metrics in run.logged.items():
        assert metrics["training/rollout_probs_diff_valid"] == 1, (step, metrics)
        assert metrics["training/rollout_probs_diff_max"] < MOST_DIFFERENCE, (step, metrics)
        assert metrics["training/rollout_actor_probs_pearson_corr"] > LEAST_CORRELATION, (step, metrics)
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] == 1e-2, (step, metrics)


def plugin_ran(
    run: Run, ranks: int, manager: str = "FSDP2SGLangShardingManager", model: str = "Qwen2ForCausalLM"
) -> None:
    """Every process role says that it is ours."""
    say = r"\[verl-sync-plugin\] pid \d+ "
    assert run.matching(say + "driver: weight sync on"), run.tail
    assert run.matching(r"\(TaskRunner\w* pid=\d+\) " + say + "task runner: replica 0 is ours"), run.tail
    assert run.matching(r"\(TaskRunner\w* pid=\d+\) " + say + rf"task runner: actor_rollout is {OUR_WORKER}"), run.tail
    server = say + rf"rollout server: {re.escape(LOADER)}, CPU backup off"
    assert run.matching(r"\(SyncSGLangHttpServer pid=\d+\) " + server), run.tail
    for rank in range(ranks):
        actor = rf"actor rank {rank}: sharding manager {manager}, buckets of 1 MiB"
        assert run.matching(r"\(WorkerDict pid=\d+\) " + say + actor), run.tail
        assert run.matching(rf"\[verl-sync-plugin\] pid \d+ loader active, rank {rank} of {model}"), run.tail
    assert len(run.matching(say + rf"moves the weights of this run: {manager}, delivery ")) == 1, run.tail
    assert not run.matching("stock verl moves the weights"), run.tail


def metrics_complete(metrics: Mapping[str, Any], step: int) -> None:
    """One step's metrics, as verl logged them."""
    assert metrics.keys() >= PHASE | COUNTS, sorted((PHASE | COUNTS) - metrics.keys())
    assert all(metrics[name] > 0 for name in PHASE | COUNTS), {name: metrics[name] for name in PHASE | COUNTS}
    assert metrics["sync/active"] == 1
    assert metrics["sync/weight_version"] == step
    assert metrics["sync/emptied_caches"] == 2, "a CPU's memory is not measured, so it is as in stock verl"
    parts = sum(metrics[name] for name in PHASE if not name.endswith("/phase"))
    assert abs(metrics["timing_s/sync/phase"] - parts) < 1e-6


def reported(run: Run, steps: int, manager: str = "FSDP2SGLangShardingManager") -> None:
    """The report file has one line for the sync before the first step and one for each step."""
    assert [report["global_steps"] for report in run.reports] == list(range(steps + 1)), run.reports
    assert {report["manager"] for report in run.reports} == {manager}
    for report in run.reports:
        check_spans(report)


def whole(run: Run, steps: int, ranks: int, manager: str = "FSDP2SGLangShardingManager", **ran: str) -> None:
    """A run to its end in which the plugin moved the weights of every step."""
    reached(run, steps)
    synced(run, steps, ranks, manager, **ran)


def synced(run: Run, steps: int, ranks: int, manager: str = "FSDP2SGLangShardingManager", **ran: str) -> None:
    """The plugin moved the weights of every step, whatever came then."""
    same_weights(run)
    plugin_ran(run, ranks, manager, **ran)
    reported(run, steps, manager)
    for step in range(1, steps + 1):
        metrics_complete(run.logged[step], step)


def check_spans(report: dict[str, Any]) -> None:
    """Every stage but the engine's sleep has spans, and the engine loads within the update, by the same clock."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for stage, start, seconds in report["spans"]:
        spans.setdefault(stage, []).append((start, start + seconds))
    assert set(spans) == set(report["stages"]) - {"sleep"} and report["spans_left_out"] == 0
    assert report["origin"]["host"]
    if "deliver_adapter" in spans:  # an adapter's factors have no way of delivery, and no hashes
        assert report["hashed_tensors"] < report["tensors"]
    else:
        assert report["delivery"] and report["hashed_tensors"] == report["tensors"]
    whole = (min(start for start, _ in spans["update_weights"]), max(end for _, end in spans["update_weights"]))
    for start, end in spans.get("engine_load", []):
        assert whole[0] <= start <= end <= whole[1], "the engine's clock is the trainer's"
