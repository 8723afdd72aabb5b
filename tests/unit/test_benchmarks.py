# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without a run: command lines, what the probe notes, medians, searches, tables."""

from __future__ import annotations

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, memory, pauses, phase, report, soak, transfer

ROOT = Path(__file__).resolve().parents[2]
PATHS = phase.Paths(model=Path("m"), prompts=Path("p"))


def line(event: str, rank: int, start: float, seconds: float, **more: Any) -> dict[str, Any]:
    process = "server" if event == "sleep" else "trainer"
    record = {"process": process, "rank": rank, "event": event, "class": "ServerAdapter", "tags": [], "ok": True}
    return {**record, "start": start, "seconds": seconds, "t": start + seconds, **more}


def one_sync(at: float, scale: float) -> list[dict[str, Any]]:
    """A sync of two ranks, the follower's stages being empty, as SGLang's are."""
    lines = [line("sleep", 0, at, 3.0 * scale)]
    for rank, share in ((0, 1.0), (1, 0.01)):
        start = at + 10
        peaks = {"peak_device_bytes": int(1e9 * scale) + rank, "rss_peak_bytes": int(2e9) + rank}
        lines += [
            line("resume", rank, start, 0.9 * scale * share, tags=["weights"]),
            line("update_weights", rank, start + 1, (1.2 + 0.1 * rank) * scale),
            line("resume", rank, start + 3, 0.03 * scale * share, tags=["kv_cache"]),
            line("sync", rank, start, (2.5 + 0.1 * rank) * scale, **peaks),
        ]
    return lines


def stock_lines() -> list[dict[str, Any]]:
    lines = [*one_sync(0, 10.0), *one_sync(100, 1.0), *one_sync(200, 1.2), *one_sync(300, 1.1)]
    next(entry for entry in lines if entry["event"] == "update_weights")["nbytes"] = 15_000
    return lines


def plugin_lines() -> list[dict[str, Any]]:
    lines = [{**entry, "class": "SyncServerAdapter"} for entry in stock_lines()]
    for step in range(4):
        stages = {"resume_weights": 0.01, "update_weights": 0.2 + step / 100, "resume_kv": 0.02}
        for replica in range(2):
            said = {"stages": {**stages, "pack": 0.1 + replica}, "nbytes": 15_000, "buckets": 4}
            lines.append({"event": "sync_report", "global_steps": step, **said})
    return lines


def result_of(tmp_path: Path) -> dict[str, Any]:
    log = tmp_path / "log"
    steps = ("update_weights:2.5 - \x1b[36mx\x1b[0m timing_s/step:20", "update_weights:1e-1 - timing_s/step:12 -")
    log.write_text("\n".join(f"step:{number} - timing_s/{line}" for number, line in enumerate(steps, 1)))
    runs = []
    for variant, lines in (("stock", stock_lines()), ("plugin", plugin_lines())):
        settings = {"counted_from": 3, "host_before_bytes": 2**30}
        (probed := tmp_path / f"{variant}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        runs.append(phase.summarize(variant, settings, probed, log))
    result = common.result_of("dense", "python -m benchmarks.phase", runs)
    result["machine"] |= {"gpu": "NVIDIA H200", "gpus": 2}
    return result


def case(**values: Any) -> phase.Case:
    words = ["--case", "dense", "--model-size", "7b", "--gpus", "2", "--rollout-tp", "2", "--out", "r.json"]
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return phase.case_of(phase.arguments(words))


def test_medians_are_of_the_slowest_rank_and_a_report_splits_stages_but_never_the_phase() -> None:
    """From the third sync on."""
    first, *measured = phase.syncs(reversed(stock_lines()))  # processes write in any order
    assert first.outer["call"] == pytest.approx(26.0) and first.bytes == 15_000
    stages = {"sleep": 3.45, "resume_weights": 1.035, "update_weights": 1.495, "resume_kv": 0.0345, "phase": 6.44}
    assert phase.medians(measured) == pytest.approx(stages)
    assert [sync.peak_device_bytes for sync in measured] == [1_000_000_001, 1_200_000_001, 1_100_000_001]
    _, *measured = phase.syncs(plugin_lines())
    of_report = {"resume_weights": 0.01, "update_weights": 0.225, "resume_kv": 0.02}
    assert phase.medians(measured) == pytest.approx(stages | of_report)
    assert measured[0].outer["update_weights"] == pytest.approx(1.3)
    assert measured[0].report["stage/pack"] == pytest.approx(1.1), "the slowest replica counts"


def test_schema_names_what_is_wrong(tmp_path: Path) -> None:
    good = result_of(tmp_path)
    assert common.problems_of(good) == [] and good["runs"][0]["samples"]["verl_update_weights_s"] == [2.5, 0.1]
    for change, message in (
        (lambda bad: bad.pop("commit"), "missing 'commit'"),
        (lambda bad: bad["runs"][0].update(variant="other"), "not one of"),
        (lambda bad: bad["runs"][1]["stages"].pop("sleep"), "stages are"),
        (lambda bad: bad["runs"][0]["samples"].update(syncs=[]), "missing or empty"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert any(message in problem for problem in common.problems_of(bad)), message


def test_variants_differ_in_bucket_key_and_switches_alone() -> None:
    stock, tuned, plugin = (phase.training_command(case(bucket_mb=512), name, PATHS) for name in common.VARIANTS)
    assert tuned == stock
    own = [phase.training_command(case(), name, PATHS) for name in common.VARIANTS]
    assert own[0] == own[1] == own[2] and not any("bucket" in word for word in own[0]), "each has its own default"
    prefix = "actor_rollout_ref.rollout."
    assert set(stock) - set(plugin) == {f"{prefix}checkpoint_engine.update_weights_bucket_megabytes=512"}
    assert set(plugin) - set(stock) == {f"{prefix}update_weights_bucket_megabytes=512"}
    env = {"VERL_USE_EXTERNAL_MODULES": "other", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    without, tuning, taken = (phase.training_environment(case(), name, Path("f"), env) for name in common.VARIANTS)
    assert set(tuning.items()) - set(without.items()) == {("TMS_RETAIN_CPU_BACKUP", "1")}
    off = {("VERL_USE_EXTERNAL_PLUGINS", "none"), ("SGLANG_PLUGINS", "none")}
    assert set(without.items()) - set(taken.items()) == off
    assert taken["VERL_USE_EXTERNAL_MODULES"] == "other,benchmarks.probe"


@pytest.mark.parametrize(
    ("part", "key", "rate"),
    [
        ("", "device_used_bytes", 2**20), ("trainer", "torch_allocated_bytes", 10_000),
        ("schedulers", "rss_bytes", 200_000), ("schedulers", "shared_bytes", 1), ("rollout", "fds", 0.1),
        ("", "seconds", 0.00005),
    ],
)  # fmt: skip
def test_growth_is_found_and_named(part: str, key: str, rate: float) -> None:
    samples = []
    for sync in range(10, 201, 10):
        held = {"rss_bytes": 10**9, "fds": 20, "threads": 10, "shared_bytes": 10**6}
        sample: dict[str, Any] = {"sync": sync, "seconds": 0.01, "device_used_bytes": 10**10}
        sample |= {"trainer": {**held, "torch_allocated_bytes": 10**9}, "schedulers": {**held}, "rollout": {**held}}
        (sample[part] if part else sample)[key] += rate * sync
        samples.append(sample)
    (found,) = soak.grown(soak.growth_of(samples, 200, "cuda"))
    assert found.startswith(f"{part}.{key}".lstrip("."))


def test_the_command_of_a_result_measures_the_same_again() -> None:
    for module, words in (
        (phase, "--case dense --model-size 7b --override a=[1,2] --override b=3 --steps 4"),
        (transfer, "--case t --model dense-7b --buckets 512,2048"),
        (soak, "--model small --trainer separate-fsdp2-lora --syncs 400"),
        (pauses, "--case p --model 7b --ways abort,in_place"),
        (memory, "--case m --model-size 7b --shares 0.9,0.8"),
    ):
        args = module.arguments([*words.split(), "--out", "x", "--work", "w"])
        name = module.__name__.removeprefix("benchmarks.")
        again = common.command_line(name, args).split()
        assert again[:3] == ["python", "-m", f"benchmarks.{name}"] and "--work" not in again
        parsed = module.arguments([word.strip("'") for word in again[3:]] + ["--out", "x", "--work", "w"])
        assert vars(parsed) == vars(args)


def test_the_headline_is_of_one_commit(tmp_path: Path) -> None:
    results = [copy.deepcopy(result_of(tmp_path)) for _ in report.HEADLINE]
    for result, name in zip(results, report.HEADLINE, strict=True):
        result.update(case=name, commit="a" * 40)
    table = report.headline_table(results).splitlines()
    assert len(table) == 2 + len(report.HEADLINE) and table[2].startswith("| 7.6 B, FSDP2 on 2 GPUs → TP2 | 6.440 s |")
    report.draw(results, tmp_path / "phase.svg")
    height = re.search(r'height="([0-9.]+)pt"', (tmp_path / "phase.svg").read_text())
    assert height is not None and float(height[1]) * 96 / 72 <= 500
    results[0]["commit"] = "b" * 40
    with pytest.raises(ValueError, match=r"the README's table is of 2 commits: a{40}, b{40}"):
        report.headline_table(results)


def test_a_time_that_no_result_holds_is_found(tmp_path: Path) -> None:
    figures = runpy.run_path(str(ROOT / ".ci" / "figures.py"))
    common.write_result(tmp_path / "dense.json", result_of(tmp_path))
    page = "# A\n`dense` took 6.44 s, 6440 ms and 6.45 s.\n## B\nAnd 6.44 s without a name."
    assert figures["unheld"](page, tmp_path) == ["6.45 s (A)", "6.44 s (B)"]
    assert figures["unheld"](page, tmp_path, ("dense",)) == ["6.45 s (A)"]
