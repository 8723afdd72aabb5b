# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without a run: command lines, what the probe notes, medians, searches, tables."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, phase, report, soak

ROOT = Path(__file__).resolve().parents[2]
PATHS = phase.Paths(model=Path("m"), prompts=Path("p"))


def one_sync(at: float, scale: float) -> list[dict[str, Any]]:
    """A sync of two ranks, the follower's stages being empty, as SGLang's are."""

    def line(event: str, rank: int, start: float, seconds: float, *tags: str, **more: Any) -> dict[str, Any]:
        process = "server" if event == "sleep" else "trainer"
        record = {"process": process, "rank": rank, "event": event, "class": "ServerAdapter", "tags": [*tags]}
        return {**record, "ok": True, "start": start, "seconds": seconds, "t": start + seconds, **more}

    lines = [line("sleep", 0, at, 3.0 * scale)]
    for rank, share in ((0, scale), (1, 0.01 * scale)):
        start, peaks = at + 10, {"peak_device_bytes": int(1e9 * scale) + rank, "rss_peak_bytes": int(2e9) + rank}
        lines += [
            line("resume", rank, start, 0.9 * share, "weights"),
            line("update_weights", rank, start + 1, (1.2 + 0.1 * rank) * scale),
            line("resume", rank, start + 3, 0.03 * share, "kv_cache"),
            line("sync", rank, start, (2.5 + 0.1 * rank) * scale, **peaks),
        ]
    return lines


def test_medians_are_of_the_slowest_rank_and_a_report_splits_stages_but_never_the_phase() -> None:
    """From the third sync on."""
    stock = [each for at, scale in enumerate((10.0, 1.0, 1.2, 1.1)) for each in one_sync(100.0 * at, scale)]
    next(entry for entry in stock if entry["event"] == "update_weights")["nbytes"] = 15_000
    first, *measured = phase.syncs(reversed(stock))  # processes write in any order
    assert first.outer["call"] == pytest.approx(26.0) and first.bytes == 15_000
    stages = {"sleep": 3.45, "resume_weights": 1.035, "update_weights": 1.495, "resume_kv": 0.0345, "phase": 6.44}
    assert phase.medians(measured) == pytest.approx(stages)
    assert [sync.peak_device_bytes for sync in measured] == [1_000_000_001, 1_200_000_001, 1_100_000_001]
    reports = [
        {
            "event": "sync_report", "global_steps": step, "nbytes": 15_000, "buckets": 4,
            "stages": {"resume_weights": 0.01, "update_weights": 0.2 + step / 100, "resume_kv": 0.02, "pack": pack},
        }
        for step in range(4) for pack in (0.1, 1.1)
    ]  # fmt: skip
    _, *measured = phase.syncs([*({**entry, "class": "SyncServerAdapter"} for entry in stock), *reports])
    of_report = {"resume_weights": 0.01, "update_weights": 0.225, "resume_kv": 0.02}
    assert phase.medians(measured) == pytest.approx(stages | of_report)
    assert measured[0].outer["update_weights"] == pytest.approx(1.3)
    assert measured[0].report["stage/pack"] == pytest.approx(1.1), "the slowest replica counts"


def stored(name: str) -> dict[str, Any]:
    """A result that is in this checkout."""
    return json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_variants_differ_in_bucket_key_and_switches_alone() -> None:
    words = ["--case", "dense", "--model-size", "7b", "--gpus", "2", "--rollout-tp", "2", "--out", "r.json"]
    given, defaults = (phase.case_of(phase.arguments([*words, *more])) for more in (["--bucket-mb", "512"], []))
    stock, tuned, plugin = (phase.training_command(given, name, PATHS) for name in common.VARIANTS)
    assert tuned == stock
    own = [phase.training_command(defaults, name, PATHS) for name in common.VARIANTS]
    assert own[0] == own[1] == own[2] and not any("bucket" in word for word in own[0]), "each has its own default"
    prefix = "actor_rollout_ref.rollout."
    assert set(stock) - set(plugin) == {f"{prefix}checkpoint_engine.update_weights_bucket_megabytes=512"}
    assert set(plugin) - set(stock) == {f"{prefix}update_weights_bucket_megabytes=512"}
    env = {"VERL_USE_EXTERNAL_MODULES": "other", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    without, tuning, taken = (phase.training_environment(defaults, name, Path("f"), env) for name in common.VARIANTS)
    assert set(tuning.items()) - set(without.items()) == {("TMS_RETAIN_CPU_BACKUP", "1")}
    off = {("VERL_USE_EXTERNAL_PLUGINS", "none"), ("SGLANG_PLUGINS", "none")}
    assert set(without.items()) - set(taken.items()) == off
    assert taken["VERL_USE_EXTERNAL_MODULES"] == "other,benchmarks.probe"


def test_growth_is_found_and_named() -> None:
    for part, key, rate in (
        ("", "device_used_bytes", 2**20), ("trainer", "torch_allocated_bytes", 10_000), ("", "seconds", 0.00005),
        ("schedulers", "rss_bytes", 200_000), ("schedulers", "shared_bytes", 1), ("rollout", "fds", 0.1),
    ):  # fmt: skip
        samples = []
        for sync in range(10, 201, 10):
            held = {"rss_bytes": 10**9, "fds": 20, "threads": 10, "shared_bytes": 10**6}
            sample: dict[str, Any] = {"sync": sync, "seconds": 0.01, "device_used_bytes": 10**10}
            sample |= {"trainer": {**held, "torch_allocated_bytes": 10**9}, "schedulers": {**held}, "rollout": {**held}}
            (sample[part] if part else sample)[key] += rate * sync
            samples.append(sample)
        (found,) = soak.grown(soak.growth_of(samples, 200, "cuda"))
        assert found.startswith(f"{part}.{key}".lstrip("."))


def test_the_headline_is_of_one_commit(tmp_path: Path) -> None:
    results = [{**stored("headline-7b-fsdp2"), "case": name, "commit": "a" * 40} for name in report.HEADLINE]
    table = report.headline_table(results).splitlines()
    stock = report.seconds(report.phases(results[0])["stock"])
    assert len(table) == 2 + len(results) and table[2].startswith(f"| 7.6 B, FSDP2 on 2 GPUs → TP2 | {stock} |")
    report.draw(results, tmp_path / "phase.svg")
    height = re.search(r'height="([0-9.]+)pt"', (tmp_path / "phase.svg").read_text())
    assert height is not None and float(height[1]) * 96 / 72 <= 500
    results[0]["commit"], results[1]["runs"][0]["settings"]["commit"] = "b" * 40, "c" * 40  # of one run alone
    results[2] |= {"commit": "d" * 40, "runs": []}  # none survived
    with pytest.raises(ValueError, match=r"the README's table is of 4 commits: a{40}, b{40}, c{40}, d{40}"):
        report.headline_table(results)


def test_a_time_that_no_result_holds_is_found() -> None:
    unheld = runpy.run_path(str(ROOT / ".ci" / "figures.py"))["unheld"]
    took = stored("headline-7b-fsdp2")["runs"][0]["stages"]["phase"]
    page = f"# A\n`headline-7b-fsdp2`: {took:.2f} s, {1000 * took:.0f} ms, 987.65 s.\n## B\n{took:.2f} s, no name."
    assert unheld(page, report.RESULTS) == ["987.65 s (A)", f"{took:.2f} s (B)"]
    assert unheld(page, report.RESULTS, ("headline-7b-fsdp2",)) == ["987.65 s (A)"]
