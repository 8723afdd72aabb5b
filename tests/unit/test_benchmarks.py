# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without a run: command lines, what the probe notes, medians, searches, tables."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import common, memory, pauses, phase, probe, report, soak, transfer

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


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines), encoding="utf-8")
    return path


def result_of(tmp_path: Path) -> dict[str, Any]:
    log = tmp_path / "log"
    log.write_text("step:1 - timing_s/update_weights:2.5 - \x1b[36mx\x1b[0m\nstep:2 - timing_s/update_weights:1e-1 -\n")
    runs = []
    for variant, lines in (("stock", stock_lines()), ("plugin", plugin_lines())):
        runs.append(phase.summarize(variant, {}, write_lines(tmp_path / f"{variant}.jsonl", lines), log))
    result = common.result_of("dense", "python -m benchmarks.phase", runs)
    result["machine"] |= {"gpu": "NVIDIA H200", "gpus": 2}
    return result


def case(**values: Any) -> phase.Case:
    words = ["--case", "dense", "--model-size", "7b", "--gpus", "2", "--rollout-tp", "2", "--out", "r.json"]
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return phase.case_of(phase.arguments(words))


def test_medians_leave_the_warm_up_out_and_take_the_slowest_rank() -> None:
    first, *measured = phase.syncs(reversed(stock_lines()))  # processes write in any order
    assert first.outer["call"] == pytest.approx(26.0) and first.bytes == 15_000
    assert phase.medians(measured) == pytest.approx(
        {"sleep": 3.3, "resume_weights": 0.99, "update_weights": 1.43, "resume_kv": 0.033, "phase": 3.3 + 2.86}
    )
    assert [sync.peak_device_bytes for sync in measured] == [1_000_000_001, 1_200_000_001, 1_100_000_001]


def test_report_splits_the_stages_but_never_the_phase() -> None:
    stock, measured = phase.medians(phase.syncs(stock_lines())[1:]), phase.syncs(plugin_lines())[1:]
    plugin = phase.medians(measured)
    assert (plugin["phase"], plugin["sleep"]) == (stock["phase"], stock["sleep"])
    assert (plugin["update_weights"], plugin["resume_weights"]) == pytest.approx((0.22, 0.01))
    assert measured[0].outer["update_weights"] == pytest.approx(1.3)
    assert measured[0].report["stage/pack"] == pytest.approx(1.1), "the slowest replica counts"


def test_two_updates_in_one_call_are_one_stage() -> None:
    updates = [entry for entry in stock_lines() if entry["event"] == "update_weights" and entry["start"] < 100]
    again = [{**entry, "start": entry["start"] + 0.5, "t": entry["t"] + 0.5, "seconds": 0.25} for entry in updates]
    first, *measured = phase.syncs([*stock_lines(), *again])
    assert first.stages["update_weights"] == pytest.approx(13.0 + 0.25) and first.bytes == 30_000
    assert measured == phase.syncs(stock_lines())[1:]


def test_run_ended_by_its_time_limit_counts_if_it_went_on_until_then() -> None:
    lines = stock_lines()
    phase.check_cut_short(lines, ended=400.0, least=3)
    for given, ended, least, why in (
        (lines, 400.0, 4, "3 measured syncs within the time limit, fewer than 4"),
        (lines, 1000.0, 3, "no sync in the last 687 s before the time limit: the run stood still"),
        ([*lines, line("resume", 0, 390, 1, ok=False)], 400.0, 3, "a call failed"),
    ):
        with pytest.raises(phase.ProbeError, match=why):
            phase.check_cut_short(given, ended=ended, least=least)
    cut = [entry for entry in lines if not (entry["event"] == "sync" and entry["start"] > 300)]
    assert len(phase.syncs(cut)) == 3, "a sync that was cut short is not counted"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no complete sync"),
        ([entry for entry in stock_lines() if entry["rank"] == 0 or entry["start"] < 100], "different numbers"),
    ],
)
def test_incomplete_probe_file_is_refused(lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(phase.ProbeError, match=message):
        phase.syncs(lines)


@pytest.mark.parametrize(("variant", "lines"), [("plugin", stock_lines()), ("stock", plugin_lines())])
def test_run_of_the_other_variant_is_refused(tmp_path: Path, variant: str, lines: list[dict[str, Any]]) -> None:
    (tmp_path / "log").touch()
    with pytest.raises(phase.ProbeError, match=f"not a {variant} run"):
        phase.summarize(variant, {}, write_lines(tmp_path / "probe.jsonl", lines), tmp_path / "log")


def test_paused_is_from_a_servers_first_stop_until_it_goes_on() -> None:
    def record(event: str, start: float, seconds: float, **more: Any) -> dict[str, Any]:
        return {"event": event, "start": start, "seconds": seconds, "pid": 1, **more}

    (sync,) = phase.separate_syncs(
        [
            record("whole", 10.0, 1.0, backend="sync_plugin"),
            record("sync", 10.1, 0.7),
            record("update_weights", 10.1, 0.8),
            record("stop", 10.2, 0.1, pid=2),
            record("go_on", 10.6, 0.1, pid=2),
            record("stop", 10.3, 0.1, pid=3),
            record("go_on", 10.8, 0.1, pid=3),
            record("go_on", 12.0, 0.1, pid=3),  # of another sync
            record("whole", 11.5, 1.0, backend="naive"),  # of a colocated replica
        ]
    )
    assert sync.outer == {"call": 1.0, "trainer": 0.7, "rollout": 0.8, "paused": 0.6}


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


def test_variants_differ_in_bucket_key_and_plugin_switch_alone() -> None:
    stock, plugin = (phase.training_command(case(), variant, PATHS) for variant in common.VARIANTS)
    prefix = "actor_rollout_ref.rollout."
    assert set(stock) - set(plugin) == {f"{prefix}checkpoint_engine.update_weights_bucket_megabytes=512"}
    assert set(plugin) - set(stock) == {f"{prefix}update_weights_bucket_megabytes=512"}
    env = {"VERL_USE_EXTERNAL_MODULES": "other", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    without, taken = (phase.training_environment(case(), name, Path("f"), env) for name in common.VARIANTS)
    off = {("VERL_USE_EXTERNAL_PLUGINS", "none"), ("SGLANG_PLUGINS", "none")}
    assert set(without.items()) - set(taken.items()) == off
    assert taken["VERL_USE_EXTERNAL_MODULES"] == "other,benchmarks.probe"


def test_overrides_follow_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert "actor_rollout_ref.model.lora.merge=True" in phase.training_command(case(lora_rank=32), "plugin", PATHS)
    given = {"strategy": "megatron", "train_tp": 2, "train_vpp": 2, "train_etp": 1}
    megatron = phase.training_command(case(case="x-bridge-y", **given), "stock", PATHS)
    assert {
        word.partition("megatron.")[2] for word in megatron if "_parallel_size=" in word and "megatron." in word
    } == {
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=1",
        "virtual_pipeline_model_parallel_size=2",
        "expert_tensor_parallel_size=1",
    }
    with pytest.raises(SystemExit):
        case(**given)
    assert "the name has -bridge in it" in capsys.readouterr().err


class Adapter:
    async def update_weights(self, weights: Any) -> str:
        return "stock"


def test_probe_writes_the_outermost_call_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_PROBE_FILE", str(tmp_path / "probe.jsonl"))
    stage = probe.Target("m", "Adapter", {"update_weights": "update_weights"}, "trainer", "stage")
    probe.watch(Adapter, stage)

    class Mixin:
        async def update_weights(self, weights: Any) -> str:
            return f"ours, {await super().update_weights(weights)}"  # type: ignore[misc]

    class Ours(Mixin, Adapter):
        pass

    class Failing(Adapter):
        async def update_weights(self, weights: Any) -> str:
            raise RuntimeError("no engine")

    assert asyncio.run(Ours().update_weights([])) == "ours, stock"
    with pytest.raises(RuntimeError, match="no engine"):
        asyncio.run(Failing().update_weights([]))
    records = phase.read_records(tmp_path / "probe.jsonl")
    assert [(record["class"], record["ok"]) for record in records] == [("Ours", True), ("Failing", False)]


def test_probed_workers_still_travel_to_ray(tmp_path: Path) -> None:
    code = """
import cloudpickle, ray, benchmarks.probe
from verl.single_controller.ray.base import RayClassWithInitArgs, create_colocated_worker_cls
from verl_sync_plugin.hooks.worker import SyncActorRolloutRefWorker as Ours
assert Ours.update_weights.sync_probe
made = create_colocated_worker_cls({"actor_rollout": RayClassWithInitArgs(cls=ray.remote(Ours), role="actor_rollout")})
cloudpickle.dumps(made.cls.__ray_metadata__.modified_class)
"""
    env = {**os.environ, "SYNC_PROBE_FILE": str(tmp_path / "probe.jsonl"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_run_past_its_limit_leaves_no_process_behind(tmp_path: Path) -> None:
    # in a process of its own: what ends "all descendants" must not see those of the test runner
    detached = "import subprocess, sys, time; "
    detached += "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", detached]
    script = "import os; from pathlib import Path; from benchmarks import common;"
    script += f"print(common.run_command({command!r}, os.environ, Path('log'), 2.0, Path('.'))[0])"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "124", done.stderr
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))


def a_run(variant: str, syncs: list[Any], **settings: Any) -> dict[str, Any]:
    stages = {**dict.fromkeys(common.STAGES, 0.0), "phase": 1.0}
    peaks = {"bytes": 4_300_000_000, "peak_device_bytes": None, "peak_host_bytes": 1}
    return {"variant": variant, "settings": settings, "stages": stages, "samples": {"syncs": syncs}, **peaks}


def a_result(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"case": "x", "machine": {"gpu": "H200", "gpus": 1}, "versions": {}, "commit": "0", "date": "2026-01-01"}
    return {**about, "command": "c", "runs": list(runs), **more}


def test_memory_search_ends_at_the_highest_share_that_survives_and_goes_on_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, tried = {"stock": 0.7, "plugin-at-once": 0.5, "plugin-multi-stage": 0.9}, []

    def attempt(args: Any, way: str, share: float, *_: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        tried.append((way, share))
        survived = share <= limits[way]
        found = {"way": way, "share": share, "survived": survived, "kv_tokens": 8 if survived else None}
        reason = "" if survived else "out | of memory"
        return {**found, "reason": reason}, a_run("plugin", [1], way=way) if survived else None

    monkeypatch.setattr(memory, "attempt", attempt)
    monkeypatch.setattr(memory.phase, "prepare", lambda *_: None)
    out = tmp_path / "x.json"
    args = memory.arguments(["--case", "x", "--model-size", "tiny", "--shares", "0.6,0.9,0.8", "--out", str(out)])
    assert memory.measure(args, tmp_path) == 0
    whole, result = list(tried), json.loads(out.read_text())
    assert whole[:3] == [("stock", 0.9), ("plugin-at-once", 0.9), ("plugin-multi-stage", 0.9)] and len(whole) == 7
    shown = report.render([result])
    assert "| `x` | stock | 0.6 | 8 |" in shown and "| plugin-at-once | none of those tried |" in shown
    result["attempts"] = result["attempts"][:4]
    out.write_text(json.dumps(result))
    tried.clear()
    assert memory.measure(args, tmp_path) == 0 and tried == whole[4:]


WARNS = "\x1b[36m(SGLangHttpServer pid=10676)\x1b[0m NCCL WARN Cuda failure 'out of memory'"
RAISED = "(SGLangHttpServer pid=7349) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB."


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([WARNS, "Traceback", RAISED, RAISED.replace("20", "30")], RAISED),
        ([WARNS, "cuMemCreate failed with 2", "end"], "cuMemCreate failed with 2"),
        ([WARNS, "UserWarning: memory is nearly full", "end"], WARNS),
        (["RuntimeError: nothing about memory", "last", ""], "last"),
    ],
)
def test_an_exception_about_memory_says_more_than_a_warning_before_it(lines: list[str], found: str) -> None:
    assert memory.reason("\n".join(lines)) == found


def test_tables_show_both_variants_and_the_speed_up(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    result["runs"][1]["stages"]["phase"] = 0.616
    result["runs"][1]["bytes"], result["runs"][0]["bytes"] = 4_300_000_000, 8_600_000_000
    result["runs"][0]["settings"]["exit_status"] = 124
    rows = [text for text in report.render([result]).splitlines() if text.startswith("| dense")]
    assert rows[0].split(" | ")[1] == "stock (cut short)" and "**6.160 s** |  | 2.0 ms | 3080 | 1.1 GiB |" in rows[0]
    assert "| plugin | 3.300 s | 0.010 s | 0.220 s | 0.020 s | **0.616 s** | 10.0× | 2.0 ms | 308 |" in rows[1]
    sync = {"stages": {"update_weights": 0.04}, "outer": {"call": 0.08, "paused": 0.03}}
    loaded = {**sync, "report": {"stage/engine_load": 0.01}}
    separate = a_result(a_run("plugin", [loaded, loaded], rollout_gpus=1))
    separate["machine"]["link_bytes_per_second"] = 500_000_000_000
    assert "| 80.0 ms | 40.0 ms | 30.0 ms | 10.0 ms | 430 GB/s, 86% of 500 | 1 |" in report.render([separate])


def test_transfers_pauses_and_soaks_are_shown() -> None:
    def transferred(variant: str, size: int, seconds: float, **more: Any) -> dict[str, Any]:
        made = a_run(variant, [1], harness="transfer", bucket_mb=size, tensors=3, **more)
        made["stages"] |= {"phase": seconds}
        made["samples"] |= {"first_syncs": [{"seconds": 100 * seconds}]}
        return made

    sizes = (512, 1024, 2048)
    ours = [transferred("plugin", size, 0.01, verify="first") for size in (*sizes, 4096)]
    staged = transferred("plugin", 512, 0.02, verify="first", staged=True)
    shown = report.render([a_result(*(transferred("stock", size, 0.4) for size in sizes), *ours, staged)])
    for size in (512, 2048):
        assert f"| x | {size} MiB | 400 ms | **10.0 ms** | 40.0× | 2.0 ms | 5.0 |" in shown
    assert "staged in every sync 20.0 ms (512 MiB); the first sync 1.00 s, stock's 40.00 s" in shown
    paused = [{"seconds": seconds, "gap": seconds * 2} for seconds in (0.012, 0.02, 0.01)]
    shown = report.render([a_result(a_run("plugin", paused, harness="pauses", way="in_place", requests=64))])
    assert "| `x` | ours | `in_place` | 64 | 12.0 ms | 10.0 ms to 20.0 ms | 24.0 ms | 3 |" in shown


def soak_samples(**rates: float) -> list[dict[str, Any]]:
    """Samples of 200 syncs in which ``part__key`` grows by a rate per sync."""
    samples = []
    for sync in range(10, 201, 10):
        held = {"rss_bytes": 10**9, "fds": 20, "threads": 10, "shared_bytes": 10**6}
        torch_bytes = {"torch_allocated_bytes": 10**9, "torch_reserved_bytes": 2 * 10**9}
        sample: dict[str, Any] = {"sync": sync, "seconds": 0.01, "device_used_bytes": 10**10}
        sample |= {"trainer": {**held, **torch_bytes}, "schedulers": dict(held), "rollout": dict(held)}
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
        ("schedulers__rss_bytes", 200_000),
        ("schedulers__shared_bytes", 1),
        ("rollout__fds", 0.1),
        ("seconds", 0.00005),
    ],
)
def test_growth_is_found_and_named(name: str, rate: float) -> None:
    found = soak.grown(soak.growth_of(soak_samples(**{name: rate}), 200, "cuda"))
    assert len(found) == 1 and found[0].startswith(name.replace("__", "."))


def test_an_odd_sample_is_no_growth_and_other_tokens_fail() -> None:
    samples = soak_samples()
    samples[0]["trainer"]["rss_bytes"], samples[-1]["trainer"]["rss_bytes"] = 10**8, 2 * 10**9
    assert soak.grown(soak.growth_of(samples, 200, "cuda")) == []
    good = {"tokens": {"first": [[1], [1]], "others": [[2], [2]]}, "growth": {}}
    assert soak.problems(good) == []
    assert soak.problems({**good, "tokens": {"first": [[1], [3]], "others": [[2], [2]]}})


def test_floor_is_each_ranks_share_read_and_written_once() -> None:
    assert common.floor_seconds(4_300_000_000, world=4, rollout_tp=2) == pytest.approx(0.75e-3)
    settings = {"gpus": 4, "rollout_tp": 2}
    runs = [{"settings": settings, "bytes": nbytes} for nbytes in (8_600_000_000, 4_300_000_000)]
    assert common.floor_of({"runs": runs}) == pytest.approx(0.75e-3), "that of the one that sends less"


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


def test_the_rollout_sees_the_second_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, seen in (("5,3", "3"), ("5", "5")):
        monkeypatch.setenv(soak.VISIBLE, visible)
        assert soak.second_gpu("cuda") == {soak.VISIBLE: seen}
    assert soak.second_gpu("cpu") == {}


def test_shapes_of_the_models() -> None:
    counts = {}
    for kind in ("dense-7b", "moe-10k", "moe-19k"):
        shapes = transfer.shapes(kind)
        elements = sum(rows * (columns[0] if columns else 1) for _, (rows, *columns) in shapes)
        counts[kind] = (len(dict(shapes)), round(2 * elements / 1e9, 2))
    assert counts == {"dense-7b": (339, 15.23), "moe-10k": (9651, 32.06), "moe-19k": (18867, 32.07)}


def test_tables_of_the_repository_are_fresh() -> None:
    assert report.main(["--check"]) == 0


QUOTED = {
    "| 7.6 B, FSDP2 on 2 GPUs → TP2 |": "dense-7b-2gpu-fsdp2-tp2-full",
    "| the same, LoRA of rank 32 merged on the way |": "dense-7b-2gpu-fsdp2-tp2-lora32",
    "| 7.6 B, Megatron TP2 → TP2 |": "dense-7b-2gpu-megatron-bridge-tp2-tp2-full",
    "| MoE 8.3 B (4827 tensors), Megatron EP2 → TP2 |": "moe-8b-2gpu-megatron-bridge-ep2-tp2-full",
    "| MoE 7.2 B of Moonlight's shapes (2257 tensors), Megatron EP2 → TP2 |": (
        "mla-7b-2gpu-megatron-bridge-ep2-tp2-full"
    ),
    "| 7.6 B, FSDP2 → TP2, an engine that never sleeps |": "dense-7b-2gpu-fsdp2-tp2-resident",
    "| 7.6 B, FSDP2 on one GPU → a GPU of its own, next to verl's `nccl` backend |": (
        "separate-dense-7b-1plus1gpu-fsdp2-tp1"
    ),
}


@pytest.mark.parametrize(("row", "name"), QUOTED.items(), ids=QUOTED.values())
def test_the_readme_quotes_the_results(row: str, name: str) -> None:
    """Medians, first and second sync of stock and plugin, each to the digits that the README gives."""
    (text,) = [text for text in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row in text]
    found = {run["variant"]: run for run in json.loads((report.RESULTS / f"{name}.json").read_text())["runs"]}
    runs = [found[variant] for variant in common.VARIANTS if variant in found]
    measured = [run["stages"]["phase"] for run in runs]
    for samples in (run["samples"] for run in runs):
        measured += [each["stages"]["phase"] for each in (samples["first_sync"], samples["syncs"][0])]
    for quoted, value in zip(re.findall(r"\d+(?:\.\d+)?", text.removeprefix(row)), measured, strict=True):
        assert abs(float(quoted) - value) <= 0.5 * 10 ** -len(quoted.partition(".")[2]) + 1e-9, (quoted, value)
