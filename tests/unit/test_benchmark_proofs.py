# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of training and of memory read, try next and show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import schema
from benchmarks.memory import measure as memory
from benchmarks.memory import search
from benchmarks.phase import cases, command
from benchmarks.report import table, training_plot
from benchmarks.rollouts import measure as rollouts
from benchmarks.training import measure as training
from benchmarks.training import metrics
from benchmarks.training.reward import compute_score

STAGES = {"sleep": 0.0, "resume_weights": 0.0, "update_weights": 1.0, "resume_kv": 0.0, "phase": 1.0}


def _run(variant: str, syncs: list[Any], **settings: Any) -> dict[str, Any]:
    peaks = {"bytes": 1, "peak_device_bytes": None, "peak_host_bytes": 1}
    return {"variant": variant, "settings": settings, "stages": STAGES, "samples": {"syncs": syncs}, **peaks}


def _result(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    about = {"case": "x", "machine": {"gpu": None}, "versions": {}, "commit": "0", "date": "2026-01-01", "command": "c"}
    return {**about, "runs": runs, **more}


def test_console_is_read_with_numpys_numbers_and_what_is_missing_is_said() -> None:
    first = "\x1b[36m(TaskRunner pid=1)\x1b[0m step:1 - critic/score/mean:np.float64(0.25) - timing_s/step:3.5"
    (step,) = metrics.steps_of(f"{first} - actor/grad_norm:1e-3 - training/rollout_probs_diff_mean:nan\nother line")
    assert (step["number"], step["reward"], step["step"], step["grad_norm"]) == (1, 0.25, 3.5, 1e-3)
    assert metrics.problems([step], 2) == [
        "1 steps instead of 2", "verl printed no response_length/mean", "verl printed no timing_s/update_weights",
    ]  # fmt: skip


def test_reward_rises_with_letters_and_not_with_short_answers() -> None:
    assert compute_score("", "a" * 32, "") == 1.0 > compute_score("", "a1" * 16, "") == 0.5
    assert compute_score("", "a", "") == 1 / 16 and compute_score("", "", "") == 0.0


def test_trainings_take_turns_and_differ_in_the_variant_alone(tmp_path: Path) -> None:
    assert training.order(2, 1) == [("stock", 0), ("plugin", 0), ("stock", 1)]
    args = training.arguments(["--case", "x", "--model-size", "tiny", "--out", "x.json", "--seed", "7"])
    paths = cases.Paths(tmp_path, tmp_path)
    lines = [set(command.training(training.case_of(args), variant, paths)) for variant in ("stock", "plugin")]
    assert all("update_weights_bucket_megabytes" in word for word in lines[0] ^ lines[1])
    assert {"data.seed=7", "actor_rollout_ref.rollout.seed=7"} < lines[0]


def test_training_is_shown_in_table_and_picture() -> None:
    steps = [{"number": number, **dict.fromkeys(metrics.METRICS, float(number))} for number in range(1, 11)]
    result = _result([_run("stock", steps, harness="training", repeat=0)])
    assert not schema.problems(result)
    (row,) = [line for line in table.render([result]).splitlines() if line.startswith("| `x` |")]
    assert row.startswith("| `x` | stock 1 | 10 | 3.000 | 8.000 | 5.5e+00 |"), row
    assert row.endswith("| 1.000 | 1 | 1.0 | 1.0e+00 |"), "of the first step"
    assert training_plot.data([result])["x"][0]["reward"] == [float(number) for number in range(1, 11)]


def test_memory_search_ends_at_the_highest_share_that_survives_and_goes_on_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, tried = {"stock": 0.7, "plugin-at-once": 0.5, "plugin-multi-stage": 0.9}, []

    def attempt(args: Any, way: str, share: float, *_: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        tried.append((way, share))
        survived = share <= limits[way]
        reason = "" if survived else "out | of memory"
        found = {"way": way, "share": share, "survived": survived, "kv_tokens": 8 if survived else None}
        return {**found, "reason": reason}, _run("plugin", [1], way=way) if survived else None

    monkeypatch.setattr(memory, "attempt", attempt)
    monkeypatch.setattr(memory.phase, "prepare", lambda *_: None)
    out = tmp_path / "x.json"
    words = ["--case", "x", "--model-size", "tiny", "--shares", "0.6,0.9,0.8", "--out", str(out)]
    args = memory.arguments(words)
    assert memory.measure(args, tmp_path) == 0
    whole, result = list(tried), json.loads(out.read_text())
    assert whole[:3] == [("stock", 0.9), ("plugin-at-once", 0.9), ("plugin-multi-stage", 0.9)] and len(whole) == 7
    shown = table.render([result])
    assert "| `x` | stock | 0.6 | 8 |" in shown and "| plugin-at-once | none of those tried |" in shown
    result["attempts"] = result["attempts"][:4]
    out.write_text(json.dumps(result))
    tried.clear()
    assert memory.measure(args, tmp_path) == 0
    assert tried == whole[4:]


@pytest.mark.parametrize("ran_out", [False, True])
def test_a_try_that_its_limit_ends_says_nothing_unless_memory_ran_out(
    ran_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--case", "x", "--model-size", "tiny", "--shares", "0.9", "--ways", "stock", "--device", "cpu"]
    args = memory.arguments([*words, "--timeout", "0", "--out", str(tmp_path / "x.json")])

    def run(case: Any, variant: str, *_: Any, **__: Any) -> None:
        log = tmp_path / f"{case.name}-{variant}-0.log"
        log.write_text("CUDA out of memory" if ran_out else "on its way")

    monkeypatch.setattr(memory.phase, "prepare", lambda *_: None)
    monkeypatch.setattr(memory.phase, "run_variant", run)
    assert memory.measure(args, tmp_path) == (0 if ran_out else 1)
    assert args.out.exists() is ran_out is ("raise it" not in capsys.readouterr().err)


def test_log_of_a_try_says_what_fits_and_what_ended_it() -> None:
    log = (
        "max_total_num_tokens=900, chunked\nmax_total_num_tokens=800,\ntorch.OutOfMemoryError: CUDA out of memory.\nend"
    )
    assert search.kv_tokens(log) == 800 and search.reason(log) == "torch.OutOfMemoryError: CUDA out of memory."
    assert search.reason("one\nlast\n\n") == "last" and search.kv_tokens("") is None


NCCL_WARNS = (
    "\x1b[36m(SGLangHttpServer pid=10676)\x1b[0m [2026-11-25 04:30:42] vm:10755:11297 [1] include/alloc.h:316 "
    "NCCL WARN Cuda failure 'out of memory'"
)
RAISED = (
    "\x1b[36m(SGLangHttpServer pid=7349)\x1b[0m torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB."
)
NCCL_RAISED = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, Cuda failure 'out of memory'"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([NCCL_WARNS, "Traceback", RAISED, RAISED.replace("20", "30")], RAISED),
        ([NCCL_WARNS, "Traceback", NCCL_RAISED, "end"], NCCL_RAISED),
        ([NCCL_WARNS, "cuMemCreate failed with 2", "end"], "cuMemCreate failed with 2"),
        ([NCCL_WARNS, "UserWarning: memory is nearly full", "end"], NCCL_WARNS),
        (["RuntimeError: nothing about memory", RAISED], RAISED),
    ],
)
def test_an_exception_about_memory_says_more_than_a_warning_before_it(lines: list[str], found: str) -> None:
    assert search.reason("\n".join(lines)) == found


def test_a_recorded_warning_is_shown_as_one() -> None:
    attempts = [
        {"way": way, "share": 0.9, "survived": False, "kv_tokens": None, "reason": reason}
        for way, reason in (("stock", NCCL_WARNS), ("plugin-at-once", RAISED))
    ]
    warned, raised = table.render([_result([], attempts=attempts)]).splitlines()[-4:-2]
    assert warned.endswith("'out of memory' (a warning; what raised was not recorded) |"), warned
    assert raised.endswith("Tried to allocate 20 MiB. |") and "\x1b" not in warned + raised


def test_served_and_merged_rollouts_differ_in_the_adapter_alone() -> None:
    args = rollouts.arguments(["--case", "x", "--model", "tiny", "--rank", "4", "--out", "x.json"])
    assert rollouts.server_options(args, "served")[4:7] == ["--enable-lora", "--max-lora-rank", "4"]
    assert rollouts.server_options(args, "merged") == ["--cuda-graph-bs", "1", "16", "64"]
    made = rollouts.factors("tiny", 4)
    assert len(made) == 2 * 7 * 2  # layers, modules, sides
    assert made["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (4, 128)


def test_rollouts_are_shown_with_their_spread() -> None:
    samples = [{"seconds": seconds, "tokens": 600} for seconds in (1.0, 3.0, 2.0)]
    shown = table.render([_result([_run("stock", samples, harness="rollouts", way="served")])])
    assert "| `x` | stock | served | 3 | 2.00 s | 1.00 to 3.00 s | 300 |" in shown
