# SPDX-License-Identifier: Apache-2.0
"""How the benchmark harness runs a training: its commands, the probe inside, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest

from benchmarks import launch, models
from benchmarks.phase import cases, command, measure, options, parse, probe, summary, tracing
from benchmarks.schema import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


def case(**values: Any) -> cases.Case:
    arguments = ["--case", "dense", "--model-size", "7b", "--gpus", "2", "--rollout-tp", "2", "--out", "r.json"]
    for name, value in values.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return options.case_of(options.arguments(arguments))


def test_variants_differ_in_bucket_key_and_plugin_switch_alone() -> None:
    paths = cases.Paths(model=Path("m"), prompts=Path("p"))
    stock, plugin = (command.training(case(), variant, paths) for variant in VARIANTS)
    prefix = "actor_rollout_ref.rollout."
    assert set(stock) - set(plugin) == {f"{prefix}checkpoint_engine.update_weights_bucket_megabytes=512"}
    assert set(plugin) - set(stock) == {f"{prefix}update_weights_bucket_megabytes=512"}
    env = {"VERL_USE_EXTERNAL_MODULES": "other", "VERL_USE_EXTERNAL_PLUGINS": "none", "NCCL_NVLS_ENABLE": "0"}
    without, taken = (command.environment(case(), variant, Path("f"), env) for variant in VARIANTS)
    assert without["VERL_USE_EXTERNAL_PLUGINS"] == without["SGLANG_PLUGINS"] == "none"
    assert set(without.items()) - set(taken.items()) == {
        ("VERL_USE_EXTERNAL_PLUGINS", "none"),
        ("SGLANG_PLUGINS", "none"),
    }
    assert taken["VERL_USE_EXTERNAL_MODULES"] == "other,benchmarks.phase.probe"
    assert taken["NCCL_NVLS_ENABLE"] == "0"
    assert taken["RAY_memory_monitor_refresh_ms"] == "0"


def test_overrides_follow_the_case() -> None:
    paths = cases.Paths(model=Path("m"), prompts=Path("p"))
    lora = command.training(case(lora_rank=32), "plugin", paths)
    assert "actor_rollout_ref.model.lora.merge=True" in lora
    shared_out = case(strategy="megatron", bridge="mbridge", train_tp=2, train_vpp=2, train_etp=1)
    megatron = command.training(shared_out, "stock", paths)
    assert "model_engine=megatron" in megatron
    sizes = {word.partition("megatron.")[2] for word in megatron if "_parallel_size=" in word and "megatron." in word}
    assert sizes == {
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=1",
        "virtual_pipeline_model_parallel_size=2",
        "expert_tensor_parallel_size=1",
    }
    assert "actor_rollout_ref.actor.megatron.vanilla_mbridge=True" in megatron
    bridge = command.training(case(strategy="megatron", case="dense-bridge"), "stock", paths)
    assert "actor_rollout_ref.actor.megatron.vanilla_mbridge=False" in bridge
    cpu = command.environment(case(device="cpu"), "stock", Path("f"), {})
    assert cpu["VERL_PLATFORM"] == "cpu" and cpu["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "trainer.device=cpu" in command.training(case(device="cpu"), "stock", paths)


def test_a_case_on_megatron_bridge_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model-size", "tiny", "--strategy", "megatron", "--out", "x"]
    assert options.case_of(options.arguments(["--case", "a-bridge-b", *given])).bridge == "megatron-bridge"
    assert options.case_of(options.arguments(["--case", "a", "--bridge", "mbridge", *given])).bridge == "mbridge"
    with pytest.raises(SystemExit):
        options.arguments(["--case", "a", *given])
    assert "with --bridge megatron-bridge the name of the case says so" in capsys.readouterr().err


def test_profile_adds_steps_whose_syncs_alone_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(line: list[str], env: dict[str, str], *rest: Any) -> tuple[int, float]:
        started.append((line, env))
        return 1, 0.0

    monkeypatch.setattr(launch, "run", run)
    paths = cases.Paths(model=Path("m"), prompts=Path("p"))
    for profile in (False, True):
        assert measure.run_variant(case(device="cpu", steps=3), "plugin", 0, paths, tmp_path, 60.0, profile) is None
    (plain, without), (longer, traced) = started
    assert set(longer) - set(plain) == {"trainer.total_training_steps=5"}
    assert {name: traced[name] for name in traced.keys() - without.keys()} == {
        tracing.FOLDER: str(tmp_path / "dense-plugin-0-traces"),
        tracing.NUMBERS: "4,5",
    }


def test_models_are_used_again_when_whole_and_prompts_are_the_cases_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(measure.subprocess, "run", lambda line, **_: made.append(line))
    folder = tmp_path / "model-7b"
    folder.mkdir()
    (folder / "config.json").touch()  # cut off while it was written
    few = pandas.read_parquet(measure.prepare(case(device="cpu", steps=1), tmp_path, None).prompts)
    assert len(made) == 1 and str(folder) in made[0]
    (folder / models.DONE).touch()
    many = pandas.read_parquet(measure.prepare(case(device="cpu", steps=5), tmp_path, None).prompts)
    assert len(made) == 1 and len(many) - len(few) == 4 * measure.ROWS_PER_STEP


@pytest.mark.parametrize(("status", "counts"), [(0, True), (launch.TIMED_OUT, True), (1, False)])
def test_run_counts_by_how_it_ended(status: int, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(launch, "run", lambda *_: (status, 1.0))
    monkeypatch.setattr(summary, "summarize", lambda variant, settings, *_: settings)
    monkeypatch.setattr(parse, "read", lambda _: [])
    monkeypatch.setattr(parse, "check_cut_short", lambda *_: checked.append(1))
    paths = cases.Paths(model=Path("m"), prompts=Path("p"))
    run = measure.run_variant(case(device="cpu"), "plugin", 0, paths, tmp_path, 60.0, False)
    assert (run is not None) == counts and len(checked) == (status == launch.TIMED_OUT)
    assert run is None or run["exit_status"] == status


def test_probe_writes_the_outermost_call_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("SYNC_PROBE_FILE", str(file))
    monkeypatch.setenv("RANK", "0")
    stage = probe.Target("m", "Adapter", {"update_weights": "update_weights"}, "trainer", "stage")
    whole = probe.Target("m", "Worker", {"update_weights": "sync"}, "trainer", "sync")

    class Adapter:
        async def update_weights(self, weights: Any) -> str:
            return "done"

    probe.watch(Adapter, stage)

    class Unchanged(Adapter):
        pass

    class SubAdapter(Adapter):
        async def update_weights(self, weights: Any) -> str:
            return await super().update_weights(weights)

    class Worker:
        async def update_weights(self) -> str:
            return await SubAdapter().update_weights([])

    Worker.update_weights.mark = "dispatch mode"
    probe.watch(Worker, whole)
    assert Worker.update_weights.mark == "dispatch mode"
    assert Unchanged.update_weights is Adapter.update_weights
    assert asyncio.run(Worker().update_weights()) == "done"
    records = parse.read(file)
    assert [(record["event"], record["class"]) for record in records] == [
        ("update_weights", "SubAdapter"),
        ("sync", "Worker"),
    ]
    assert records[1]["seconds"] >= records[0]["seconds"]
    assert records[1]["rss_peak_bytes"] > 0


def test_probe_times_what_comes_from_a_mixin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass whose method stands in a class before the watched one, and calls that one's."""
    file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("SYNC_PROBE_FILE", str(file))

    class Worker:
        async def update_weights(self) -> str:
            return "stock"

    probe.watch(Worker, probe.Target("m", "Worker", {"update_weights": "sync"}, "trainer", "sync"))

    class Mixin:
        async def update_weights(self) -> str:
            return f"ours, {await super().update_weights()}"  # type: ignore[misc]

    class Ours(Mixin, Worker):
        pass

    class Further(Ours):
        pass

    for worker in (Ours(), Further()):
        assert asyncio.run(worker.update_weights()) == "ours, stock"
    assert [record["class"] for record in parse.read(file)] == ["Ours", "Further"]


PICKLED = """
import benchmarks.phase.probe, ray
from ray import cloudpickle
from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls
from verl_sync_plugin.hooks.worker import SyncActorRolloutRefWorker as Ours
assert Ours.update_weights.sync_probe
made = create_colocated_worker_cls({"actor_rollout": RayClassWithInitArgs(cls=ray.remote(Ours), role="actor_rollout")})
cloudpickle.dumps(made.cls.__ray_metadata__.modified_class)
"""


def test_probed_workers_still_travel_to_ray(tmp_path: Path) -> None:
    env = {**os.environ, "SYNC_PROBE_FILE": str(tmp_path / "probe.jsonl"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PICKLED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_probe_records_a_failure_and_lets_it_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("SYNC_PROBE_FILE", str(file))
    target = probe.Target("m", "ServerAdapter", {"resume": "resume"}, "trainer", "stage")

    async def resume(self: object, tags: list[str]) -> None:
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        asyncio.run(probe.timed(target, "resume", resume)(object(), tags=["weights"]))
    (record,) = parse.read(file)
    assert record["ok"] is False and record["tags"] == ["weights"]


def test_run_past_its_limit_leaves_no_process_behind(tmp_path: Path) -> None:
    # in a process of its own: what ends "all descendants" must not see those of the test runner
    detached = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    )
    command_line = [sys.executable, "-c", detached + "; import time; time.sleep(60)"]
    script = (
        "import os; from pathlib import Path; from benchmarks import launch;"
        f"print(launch.run({command_line!r}, os.environ, Path('log'), 2.0, Path('.'))[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        **{"capture_output": True, "text": True, "timeout": 60, "check": True},
    )
    assert done.stdout.strip() == "124"
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))
