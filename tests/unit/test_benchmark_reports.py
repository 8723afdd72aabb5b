# SPDX-License-Identifier: Apache-2.0
"""What is made of the benchmark's results: floor, tables, picture, growth over a soak."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import floor
from benchmarks.report import plot, table, throughput_table, transfer_table
from benchmarks.soak import growth


def transfer_run(variant: str, bucket_mb: int, seconds: float, hashed: bool = True, verify: str = "") -> dict[str, Any]:
    settings = {"harness": "transfer", "bucket_mb": bucket_mb, "hashed": hashed and variant == "plugin", "tensors": 3}
    settings["verify"] = verify
    samples = {"first_syncs": [{"seconds": 100 * seconds}]}
    stages = {"sleep": 0.0, "resume_weights": 0.0, "resume_kv": 0.0, "update_weights": seconds, "phase": seconds}
    return {"variant": variant, "settings": settings, "stages": stages, "bytes": 4_300_000_000, "samples": samples}


def transfer(*runs: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpu": "H200", "gpus": 1}
    return {"case": "t", "machine": machine, "versions": {"verl": "1"}, "commit": "c", "date": "d", "runs": list(runs)}


def test_floor_is_each_ranks_share_read_and_written_once() -> None:
    assert floor.seconds(4_300_000_000) == pytest.approx(2e-3)
    assert floor.seconds(4_300_000_000, world=4, rollout_tp=2) == pytest.approx(0.75e-3)
    settings = {"gpus": 4, "rollout_tp": 2}
    fp32, bf16 = ({"settings": settings, "bytes": nbytes} for nbytes in (8_600_000_000, 4_300_000_000))
    assert floor.of_result({"runs": [fp32, bf16]}) == pytest.approx(0.75e-3), "that of the one that sends less"
    assert floor.of_result({"runs": [{"settings": settings, "bytes": None}]}) is None


def test_transfer_table_shows_the_smallest_and_largest_bucket_that_can_be_compared() -> None:
    result = transfer(
        *(transfer_run("stock", size, 0.4) for size in (512, 1024, 2048)),
        *(transfer_run("plugin", size, 0.01) for size in (512, 1024, 2048, 4096)),
        transfer_run("plugin", 512, 0.008, hashed=False),
    )
    text = table.render([result])
    rows = [line for line in text.splitlines() if line.startswith("| t ")]
    assert rows == [
        "| t | 512 MiB | 400 ms | **10.0 ms** | 40.0× |  |  | 2.0 ms | 5.0 |",
        "| t | 2048 MiB | 400 ms | **10.0 ms** | 40.0× |  |  | 2.0 ms | 5.0 |",
    ]
    first = "the first sync 1.00 s, stock's 40.00 s"
    assert f"3 tensors, 4.30 GB of bf16; without hashes 8.0 ms (512 MiB); {first}." in text
    assert transfer_table.shown_buckets(transfer(transfer_run("plugin", 8, 1.0))) == [8]


def test_transfer_table_shows_the_default_comparison_and_notes_the_others() -> None:
    kinds = {"never": 0.01, "first": 0.011, "always": 0.02}
    text = table.render([transfer(*(transfer_run("plugin", 512, s, verify=kind) for kind, s in kinds.items()))])
    assert "| t | 512 MiB |  | **11.0 ms** |" in text
    assert "never compared in the engine 10.0 ms (512 MiB); compared in the engine in every sync 20.0 ms" in text


def lora(name: str, lengths: list[float], extra: tuple[str, ...] = (), **changed: Any) -> dict[str, Any]:
    settings = {"name": name, "lora_rank": 32, "gpus": 1, "extra": ["offload=True", *extra], **changed}
    rollouts = [{"seconds": seconds, "tokens": 1000} for seconds in lengths]
    runs = [{"variant": name, "settings": settings, "samples": {"rollouts": rollouts}} for name in ("stock", "plugin")]
    return {"case": name, "runs": runs}


def test_rollouts_of_merged_and_adapter_runs_that_differ_in_nothing_else() -> None:
    """No more digits than are known: verl looks for finished rollouts every two seconds."""
    merged = lora("merged", [6.1, 2.07, 2.09])
    adapter = lora("adapter", [8.1, 4.06, 4.05], ("actor_rollout_ref.model.lora.merge=False",))
    text = throughput_table.render([adapter, merged])
    expected = "| `merged`, `adapter` | plugin | 1000 | 0 to 2 s | 2 to 4 s |"
    assert text[-1] == expected and len([line for line in text if line.startswith("| `")]) == 2
    assert throughput_table.render([merged]) == []
    other = lora("other", [1, 1], ("actor_rollout_ref.model.lora.merge=False",), gpus=2)
    assert throughput_table.render([merged, other]) == [], "another machine"
    assert throughput_table.render([lora("merged", [1]), adapter]) == [], "nothing but a warm-up"


def test_bars_add_up_to_the_phase() -> None:
    for case in plot.data(table.load(table.RESULTS))["phase"]:
        (result,) = (found for found in table.load(table.RESULTS) if found["case"] == case["case"])
        for run in result["runs"]:
            parts = case["bars"][run["variant"]]
            assert sum(parts.values()) == pytest.approx(run["stages"]["phase"], abs=1e-5)
            assert min(parts.values()) >= 0
            assert parts["sleep"] == run["stages"]["sleep"]


def test_picture_tells_whether_it_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "results", tmp_path / "plot.svg"
    shutil.copytree(table.RESULTS, results, ignore=shutil.ignore_patterns("*.svg"))
    arguments = ["--results", str(results), "--out", str(picture)]
    assert plot.main([*arguments, "--check"]) == 1, "there is none"
    assert plot.main(arguments) == 0
    assert plot.main([*arguments, "--check"]) == 0
    drawn = picture.read_bytes()
    assert b"<text" in drawn and len(drawn) < 300_000, "outlines of letters would be ten times as large"
    assert plot.main(arguments) == 0 and picture.read_bytes() == drawn, "the same results, the same file"
    for case in ("dense-7b-2gpu-fsdp2-tp2-full", "transfer-moe-10k-1gpu"):
        assert case in drawn.decode()
    changed = results / "dense-7b-2gpu-fsdp2-tp2-full.json"
    result = json.loads(changed.read_text())
    result["runs"][0]["stages"]["sleep"] += 0.01
    changed.write_text(json.dumps(result))
    assert plot.main([*arguments, "--check"]) == 1
    assert "python -m benchmarks.plot" in capsys.readouterr().err


def test_tables_and_picture_of_the_repository_are_fresh() -> None:
    assert table.main(["--check"]) == 0
    assert plot.main(["--check"]) == 0
    assert "benchmarks/results/plot.svg" in (table.ROOT / "docs" / "results.md").read_text(encoding="utf-8")


QUOTED = {
    "| 7.6 B, FSDP2 on 2 GPUs → TP2 |": "dense-7b-2gpu-fsdp2-tp2-full",
    "| the same, LoRA of rank 32 merged on the way |": "dense-7b-2gpu-fsdp2-tp2-lora32",
    "| 7.6 B, Megatron TP2 → TP2 |": "dense-7b-2gpu-megatron-bridge-tp2-tp2-full",
    "| MoE 8.3 B (4827 tensors), Megatron EP2 → TP2 |": "moe-8b-2gpu-megatron-bridge-ep2-tp2-full",
    "| MoE 7.2 B of Moonlight's shapes (2257 tensors), Megatron EP2 → TP2 |": (
        "mla-7b-2gpu-megatron-bridge-ep2-tp2-full"
    ),
    "| MoE 16 B (9651 tensors), Megatron EP4 → TP4 |": "moe-16b-4gpu-megatron-ep4-tp4-full",
    "| 7.6 B, FSDP2 → TP2, an engine that never sleeps |": "dense-7b-2gpu-fsdp2-tp2-resident",
    "| 7.6 B, FSDP2 on one GPU → a GPU of its own, beside verl's `nccl` backend |": (
        "separate-dense-7b-1plus1gpu-fsdp2-tp1"
    ),
}


@pytest.mark.parametrize(("row", "case"), QUOTED.items(), ids=QUOTED.values())
def test_the_readme_quotes_the_results(row: str, case: str) -> None:
    """Medians, first and second sync of stock and plugin, each to the digits that the README gives."""
    (line,) = [line for line in (table.ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row in line]
    runs = {run["variant"]: run for run in json.loads((table.RESULTS / f"{case}.json").read_text())["runs"]}
    measured = []
    variants = [name for name in ("stock", "plugin") if name in runs]
    measured += [runs[name]["stages"]["phase"] for name in variants]
    for name in variants:
        samples = runs[name]["samples"]
        measured += [each["stages"]["phase"] for each in (samples["first_sync"], samples["syncs"][0])]
    quoted = re.findall(r"\d+(?:\.\d+)?", line.removeprefix(row))
    assert len(quoted) == len(measured)
    for text, value in zip(quoted, measured, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(float(text) - value) <= 0.5 * 10**-digits + 1e-9, (text, value)


def soak_samples(**rates: float) -> list[dict[str, Any]]:
    """Samples of 200 syncs in which ``part__key`` grows by a rate per sync."""
    samples = []
    for sync in range(10, 201, 10):
        trainer = {"rss_bytes": 10**9, "fds": 12, "threads": 4, "torch_allocated_bytes": 10**9}
        trainer["torch_reserved_bytes"] = 2 * 10**9
        sample = {"sync": sync, "seconds": 0.01, "device_used_bytes": 10**10, "trainer": trainer}
        sample["schedulers"] = {"rss_bytes": 10**9, "fds": 60, "threads": 27, "shared_bytes": 10**6}
        sample["rollout"] = {"rss_bytes": 10**9, "fds": 20, "threads": 10, "shared_bytes": 10**6}
        for name, rate in rates.items():
            part, _, key = name.rpartition("__")
            (sample[part] if part else sample)[key] += rate * sync
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("device_used_bytes", 2**20),
        ("trainer__torch_allocated_bytes", 10_000),
        ("trainer__torch_reserved_bytes", 2**20),
        ("trainer__rss_bytes", 200_000),
        ("trainer__fds", 0.1),
        ("trainer__threads", 0.1),
        ("schedulers__rss_bytes", 200_000),
        ("schedulers__fds", 0.1),
        ("schedulers__threads", 0.1),
        ("schedulers__shared_bytes", 1),
        ("rollout__rss_bytes", 200_000),
        ("rollout__fds", 0.1),
        ("seconds", 0.00005),
    ],
)
def test_growth_is_found_and_named(name: str, rate: float) -> None:
    found = growth.problems(growth.of(soak_samples(**{name: rate}), 200, "cuda"))
    assert len(found) == 1 and found[0].startswith(name.replace("__", "."))


def test_a_step_at_the_start_and_an_odd_sample_are_no_growth() -> None:
    samples = soak_samples()
    assert growth.problems(growth.of(samples, 200, "cuda")) == []
    samples[0]["trainer"]["rss_bytes"] = 10**8
    samples[-1]["trainer"]["rss_bytes"] = 2 * 10**9
    samples[-1]["seconds"] = 1.0
    assert growth.problems(growth.of(samples, 200, "cuda")) == []
    assert "seconds" not in growth.of(samples, 200, "cpu")


def test_soak_that_ends_with_other_tokens_fails() -> None:
    from benchmarks.soak import measure as soak

    good = {"tokens": {"first": [[1], [1]], "others": [[2], [2]]}, "growth": {}}
    assert soak.problems(good) == []
    assert soak.problems({**good, "tokens": {"first": [[1], [3]], "others": [[2], [2]]}})
    assert soak.problems({**good, "tokens": {"first": [[1], [1]], "others": [[1], [1]]}})


def test_results_in_the_repository_have_a_floor_and_a_profile() -> None:
    results = [result for result in table.load(table.RESULTS) if transfer_table.harness(result) == "transfer"]
    assert {result["case"] for result in results} >= {"transfer-dense-7b-1gpu", "transfer-moe-10k-1gpu"}
    for result in results:
        for run in result["runs"]:
            assert run["stages"]["phase"] > run["settings"]["floor_seconds"]
            if run["variant"] == "plugin":
                # Of an engine apart, what it replays stands in the report of its own rank
                apart = "rollout_gpus" in run["settings"]
                counted = "hashed_tensors" if apart else "replayed_tensors"
                assert {s["report"][counted] for s in run["samples"]["syncs"]} == {run["settings"]["tensors"]}
