# SPDX-License-Identifier: Apache-2.0
"""Covers ``verl-sync doctor`` on healthy, broken and other machines, and what ``verl-sync prove`` refuses."""

import importlib.metadata
import itertools
import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
import torch
import transformers
import verl

from fresh_process import Told, broken, doctor, first_in_path, other_plugin
from verl_sync_plugin.cli import main
from verl_sync_plugin.trainers import base
from verl_sync_plugin.transport import memory

ROOT = Path(__file__).resolve().parents[2]
SGLANG, ROLLOUT = "actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout"
COMMAND = f"python -m verl.trainer.main_ppo {SGLANG} actor_rollout_ref.actor.strategy=fsdp2 {ROLLOUT}.dtype=bfloat16"
POLICY, MODULES, PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"


def real(test: Any) -> Any:
    """Marks what starts processes of the doctor's own."""
    return pytest.mark.slow(pytest.mark.timeout(400)(test))


@real
def test_healthy_stack_is_ready(tmp_path: Path, tiny_model: Any) -> None:
    """Checks a whole pasted command whose model is there, in the quickstart's environment."""
    model = f"actor_rollout_ref.model.path={tiny_model('qwen2')}"
    told = doctor(tmp_path, "--", *COMMAND.split(), model, f"{ROLLOUT}.quantization=fp8", VERL_PLATFORM="")
    assert told.code == 0 and told.found["ready"] and not told.bad, told.bad
    assert told.findings["hooks"]["text"] == "all hooks of verl and of the engine are ours"
    assert not [check for check in told.findings if check.startswith("hook/")]
    assert told.findings["overrides"]["text"] == "weight sync on"
    # as the log of a run with it
    assert told.findings["model"]["text"].startswith("Qwen2ForCausalLM is served; a sync sends 27 tensors, 0.23 MB")
    assert told.findings["model"]["text"].endswith("; the engine keeps up to 14 of them, 0.15 MB, in fp8")
    assert told.findings["memory"]["text"] == (
        "per GPU about 0.12 MB in the engine (in fp8 half of it), and at most 0.46 MB of staging (twice that in the "
        "first sync) where weights are not read in place; on the host no copy while the engine sleeps"
    )
    node = told.found["nodes"][0]
    assert node["versions"]["verl"] == "0.9.1"
    text = (ROOT / "docs/doctor.md").read_text()
    words = {*told.found, *node, *node["findings"][0], *(check for check in told.findings if "/" not in check)}
    assert [word for word in sorted(words) if f"`{word}`" not in text] == [], "they are documented"


TAKES = 'from verl.workers.rollout.base import _ROLLOUT_REGISTRY as known; known["sglang", "async"] = "other_plugin.A"'
LATER = f'import wrapt; wrapt.register_post_import_hook(lambda _: exec({TAKES!r}), "verl_sync_plugin.hooks.engines")'
TAKEN, LEAVE_OUT = "already taken by 'other_plugin.A'", "Uninstall one of the two plugins"
BROKEN, AGAIN = "ImportError: broken on purpose", "pip install --force-reinstall"


@real
@pytest.mark.parametrize(("other", "code", "check", "text", "remedy"), [
    (other_plugin, TAKES, "import", TAKEN, LEAVE_OUT),
    (other_plugin, LATER, "hook/rollout-config", TAKEN, LEAVE_OUT),
    (broken, "rollouts/sglang/loader.py", "hook/engine-loader", BROKEN, AGAIN),
    pytest.param(broken, "compat.py", "import", BROKEN, AGAIN, marks=pytest.mark.extended),
])  # fmt: skip
def test_another_plugin_or_a_broken_module(
    other: Callable[..., Path], code: str, check: str, text: str, remedy: str, tmp_path: Path
) -> None:
    words = ["--", SGLANG] if check == "import" else []
    told = doctor(tmp_path, "--ray", "127.0.0.1:1", *words, PYTHONPATH=first_in_path(other(tmp_path, code)))
    assert told.code == 1 and told.bad == {check: "problem", "ray": "problem"}
    assert text in told.findings[check]["text"] and remedy in told.findings[check]["remedy"]
    assert "127.0.0.1:1" in told.findings["ray"]["text"] and "ray start --head" in told.findings["ray"]["remedy"]
    run = told.found["nodes"][0]["run"]
    assert not words or run["line"] == "not looked at, since verl does not load the plugin here"


# In this process, on a machine of two GPUs; what would be processes of the doctor's own is done here


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Calls the doctor on such a machine, with such versions and environment; ``says``: of verl's own code."""
    installed = importlib.metadata.version

    def told(
        *words: str, gpus: int = 2, cuda: str | None = "13.0", driver: bool = True, peers: bool = True, ipc: str = "",
        shm: tuple[int, int] = (64 << 30, 60 << 30), nofile: int = resource.RLIM_INFINITY, says: str = "",
        versions: Any = (), as_text: bool = False, by_pip: bool = True, **environment: str,
    ) -> Any:  # fmt: skip
        known = {"torch-memory-saver": "0.0.9", **dict(versions)}

        def run(command: list[str], env: Any = (), **_: Any) -> Any:
            if command[1] == "-m":
                with (
                    mock.patch.dict(os.environ, env), mock.patch.object(sys, "argv", command[2:]),
                    mock.patch.object(torch.cuda, "is_available", return_value=False), redirect_stdout(StringIO()),
                ):  # fmt: skip
                    runpy.run_module(command[2], run_name="__main__")
            return SimpleNamespace(returncode=bool(ipc), stderr=ipc.encode())

        def version(package: str) -> str:
            if known.get(package, "") is None:
                raise importlib.metadata.PackageNotFoundError
            return known.get(package) or installed(package)

        with monkeypatch.context() as patch:
            for name, value in {
                "is_available": gpus > 0, "device_count": gpus, "get_device_name": "NVIDIA H200", "synchronize": None,
                "can_device_access_peer": peers,
            }.items():  # fmt: skip
                patch.setattr(torch.cuda, name, lambda *_, value=value: value)
            patch.setattr(torch.version, "cuda", cuda)
            patch.setattr(memory, "Staging", lambda *_: SimpleNamespace(memory=torch.zeros(1), export=""))
            patch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi" if driver else None)
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=shm[0], free=shm[1]))
            patch.setattr(resource, "getrlimit", lambda of: (nofile, nofile))
            patch.setattr(subprocess, "run", run)
            patch.setattr(importlib.metadata, "version", version)
            # verl's own says 0.10.0.dev, and its metadata, as pip writes them, 0.10.0.dev0
            patch.setattr(verl, "__version__", says or known.get("verl", verl.__version__).replace("dev0", "dev"))
            if not by_pip:
                patch.setattr(importlib.metadata, "entry_points", lambda group: [])
            for name, text in {PLATFORM: "", **environment}.items():
                patch.setenv(name, text)
            capsys.readouterr()
            code = main(["doctor", *([] if as_text else ["--json"]), *words])
        printed = capsys.readouterr().out
        return printed if as_text else Told(code, json.loads(printed), "")

    return told


ON_CPU = "none is used: verl's platform here is the CPU"
PROBLEM, WARNING = "problem", "warning"


@pytest.mark.parametrize(
    ("given", "check", "level", "text", "remedy"),
    [
        ({}, "gpu", "ok", "2 × NVIDIA H200; CUDA 13.0", ""),
        ({"gpus": 0}, "gpu", PROBLEM, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": 0, "cuda": None, PLATFORM: "nvidia"}, "gpu", PROBLEM, "a build without CUDA", "install the torch"),
        ({"gpus": 0, "driver": False}, "gpu", WARNING, "only starts runs", "--ray"),
        ({"peers": False}, "peer-access", WARNING, "0→1, 1→0", "nvidia-smi topo"),
        ({"ipc": "RuntimeError: CUDA error: invalid"}, "cuda-ipc", PROBLEM, "CUDA error: invalid", "--ipc=host"),
        ({"shm": (64 << 20, 64 << 20)}, "shm", PROBLEM, "0.1 GiB", "--shm-size"),
        ({"shm": (64 << 30, 1 << 20)}, "shm", WARNING, "0.0 GiB", "ls -la /dev/shm"),
        ({"PYTORCH_ALLOC_CONF": "a, expandable_segments : True"}, "expandable-segments", PROBLEM, "", "take"),
        ({"NCCL_CUMEM_ENABLE": "1"}, "nccl-cumem", WARNING, "sets it to 0", "unset"),
        ({"nofile": 512}, "ulimit/nofile", WARNING, "nofile is 512", "ulimit -n 65536"),
        ({"versions": {"torch-memory-saver": None}}, "version/torch-memory-saver", PROBLEM, "", "pip install torch"),
        ({"versions": {"torch": None}}, "version/torch", PROBLEM, sys.prefix, "environment that runs verl and SGLang"),
        # the quickstart's environment needs no variable
        ({"gpus": 0, "cuda": None}, "gpu", "ok", ON_CPU, ""),
        ({"gpus": 0, PLATFORM: "CPU "}, "gpu", "ok", ON_CPU, ""),
        # ways by which verl finds the plugin
        ({POLICY: "none"}, "whitelist", PROBLEM, "", f"{POLICY}=verl_sync_plugin, or unset"),
        ({POLICY: "theirs, Other"}, "whitelist", PROBLEM, "", f"{POLICY}=theirs,other,verl_sync_plugin, or unset"),
        ({POLICY: "none", MODULES: "verl_sync_plugin.plugin"}, "entry-point", "ok", "in verl.plugins", ""),
        ({POLICY: "theirs,verl_sync_plugin"}, "entry-point", "ok", "in verl.plugins", ""),
        ({"by_pip": False}, "entry-point", PROBLEM, "", "instead of PYTHONPATH"),
        ({"by_pip": False, MODULES: "verl_sync_plugin.plugin"}, "entry-point", WARNING, "", "on every node, too"),
        # versions
        *(
            ({"versions": {package: version}}, f"version/{package}", level, version, "pip install" * (level != "ok"))
            for package, level, versions in (
                ("verl", "ok", ("0.9.0", "0.9", "0.9.1+ours")), ("verl", WARNING, ("0.10.0.dev0", "0.10.0rc1")),
                ("verl", PROBLEM, ("0.8.0", "0.11.0", "of-our-own")), ("sglang", "ok", ("0.5.23",)),
                ("sglang", WARNING, ("0.5.17",)),
            )
            for version in versions
        ),
        ({"versions": {"sglang": "0.5.9"}}, "version/sglang", PROBLEM, "sglang 0.5.12 or newer is", "sglang==0.5.12"),
        ({"says": "0.8.0"}, "version/verl", PROBLEM, "the code that is imported says 0.8.0", "keep one installation"),
    ],
)  # fmt: skip
def test_a_machine_and_an_environment(
    given: dict[str, Any], check: str, level: str, text: str, remedy: str, tell: Callable[..., Told]
) -> None:
    if given.get("driver") is False and Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver here")
    told = tell(**given)
    assert told.bad == ({check: level} if level != "ok" else {})
    assert text in told.findings[check]["text"] and remedy in told.findings[check]["remedy"]


def test_a_hook_that_fails(tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers hides what stops an import of its own. Hooks of the engine need a GPU to be judged."""
    error = ModuleNotFoundError("Could not import module 'A'")
    error.__cause__ = RuntimeError("nms")
    monkeypatch.setattr("verl_sync_plugin.rollouts.sglang.LOADER_MODULE", "no.such.module")
    told = tell()
    assert told.bad == {"hook/engine-loader": WARNING}
    assert "on a node with GPUs" in told.findings["hook/engine-loader"]["remedy"]
    monkeypatch.setattr(base, "refuse_other_engines", mock.Mock(side_effect=error))
    found = (told := tell()).findings["hook/training-engines"]
    assert told.bad == {"hook/training-engines": PROBLEM}, "one cause is one finding"
    assert "import module 'A' (because of RuntimeError: nms)" in found["text"] and AGAIN in found["remedy"]
    assert tell(versions={"sglang": None}).bad == {"version/sglang": PROBLEM}, "its version says that already"


def test_a_cluster_whose_nodes_differ(tell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real Ray: ``e2e/test_doctor_cluster.py``. Both nodes have one verl and one Python, as PEP 440 has it."""
    plugin, versions = "verl-sync-plugin", tell().found["nodes"][0]["versions"]
    one = {**versions, "verl": "0.9.1.dev", "python": "3.12", "peft": "1", plugin: "0.2.0 (1a2b3c4d5e6f)"}
    two = {**one, "verl": "0.9.1.dev0", "python": "3.12.0", "peft": None, plugin: "0.2.0 (0a2b3c4d5e6f)"}
    breaks = [{"level": PROBLEM, "check": "gpu", "text": "it broke", "remedy": "mend it"}]
    asked = itertools.cycle(({"versions": one, "findings": []}, {"versions": two, "findings": breaks}))
    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: next(asked)))
    nodes = [
        {"NodeID": f"{n}" * 56, "NodeManagerHostname": f"n{n}", "NodeManagerAddress": f"10.0.0.{n}", "Alive": n < 3}
        for n in (1, 2, 3)
    ]
    for name, does in {
        "init": lambda *_, **__: None, "nodes": lambda: nodes, "remote": lambda **_: lambda call: task,
        "get": lambda answer, timeout: answer, "shutdown": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(ray, name, does)
    between = {each["check"]: (each["level"], each["text"]) for each in tell("--ray").found["findings"]}
    assert between.keys() == {"nodes/verl", "nodes/python", "nodes/peft", f"nodes/{plugin}"}, "from this machine's"
    assert between["nodes/verl"][1].endswith("; 0.9.1.dev on n1 (111111), n2 (222222)")
    assert between["nodes/peft"][0] == WARNING and "none on n2 (222222)" in between["nodes/peft"][1]
    assert between[f"nodes/{plugin}"][0] == PROBLEM and "0.2.0 (0a2b3c4d5e6f) on n2" in between[f"nodes/{plugin}"][1]
    text = tell("--ray", as_text=True)
    parts = ("n2 (222222) 10.0.0.2", "PROBLEM  gpu: it broke", "→ mend it", "WARNING  nodes/peft: ", "not ready, probl")
    assert all(part in text for part in parts), text
    assert "\nready, " in tell(as_text=True)


@pytest.mark.parametrize(
    ("words", "level", "text", "remedy"),
    [
        (f"{ROLLOUT}.dtype=int8", PROBLEM, "dtype='int8': not a dtype of SGLang's weights", "bfloat16"),
        (f"{ROLLOUT}.custom.sync.timeout_secs=3", PROBLEM, "timeout_secs=3: unknown key", "sync.timeout_seconds"),
        (f"{ROLLOUT}.bogus=1", PROBLEM, "bogus", "+"),
        ("--config-name=nothing", PROBLEM, "nothing", "correct key"),
        ("--config-path=/no/such", PROBLEM, "/no/such", "correct key"),
        ("--config-path", PROBLEM, "expected one argument", "correct key"),
        ("--config-dir=/x", PROBLEM, "--config-dir=/x: only overrides", "Leave it out"),
        ("notakey", PROBLEM, "notakey", "correct key or value"),
        (f"{ROLLOUT}.name=vllm", PROBLEM, "name=vllm: the plugin does not serve this rollout", "one of: sglang"),
        ("actor_rollout_ref.actor.strategy=veomni", PROBLEM, "weight sync NOT IN USE", "leave that key out"),
        (f"{ROLLOUT}.custom.sync.enabled=False", WARNING, "stock verl moves the weights", "leave out"),
        ("actor_rollout_ref.model.path=/no/such/model", WARNING, "no such folder", "correct the path"),
        ("actor_rollout_ref.model.path=null", WARNING, "no such folder", "correct the path"),
        ("+sync=colocated", "", "", ""),  # and no word of verl's default model, which nobody named
        ("actor_rollout_ref.model.path=Nobody/model", WARNING, "is not known here", "hf download Nobody/model"),
        # whole commands
        ("main_ppo.py --config-path=config --config-name=ppo_megatron_trainer ~trainer.logger", "", "", ""),
        ("x/verl/trainer/main_generation_server.py -cn ppo_trainer.yaml", "", "", ""),
        (f"main_generation_server.py {ROLLOUT}.custom.sync.verify=always", WARNING, "without", "leave these keys out"),
        ("A=1 python3 -m verl.trainer.main_ppo +x=y.py", "", "", ""),
        ("verl/trainer/main_ppo.py ~trainer.logger", "", "", ""),
        ("python3 -m verl.experimental.x.main_ppo --config-path x rollout.nnodes=1", WARNING, "not checked", "alone"),
        ("bash examples/run.sh trainer.nnodes=1", WARNING, "not checked", "or script"),
    ],
)
def test_overrides(words: str, level: str, text: str, remedy: str, tell: Callable[..., Told]) -> None:
    first, *rest = words.split()
    told = tell(*((first, *rest, SGLANG) if rest else ("--", SGLANG, first)))  # a command needs no dashes
    assert [*told.bad.values()] == ([level] if level else []), told.bad
    for check in told.bad:
        found = told.findings[check]
        assert text in found["text"] and remedy in found["remedy"] and "\n" not in found["text"], found


def test_prove_lacks_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Fails a check with a remedy."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB."))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert main(["prove", str(tmp_path)]) == 1
    row, _, last = capsys.readouterr().out.splitlines()[-3:]
    assert "  FAILED  loading the trainer's model failed. rank 0: torch.OutOfMemoryError: CUDA out of" in row
    assert "Tried to allocate 1.02 GiB. Give the trainer's model more room: --trainer-dtype bfloat16" in row
    assert last == "NOT proven"


@pytest.mark.parametrize(
    ("config", "world", "words", "why"),
    [
        (None, "1", [], "no folder with a config.json; download the checkpoint"),
        ("{", "1", [], "is not a valid JSON file"),
        ("{}", "x", [], "--tp 1 with WORLD_SIZE=x: start"),
        ("{}", "1", ["--tp", "2"], "torchrun --nproc-per-node 2"),
        ("{}", "1", ["--syncs", "0"], "--syncs 0: use 1 or more"),
    ],
)
def test_refused(
    config: str | None, world: str, words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit) as ended:
        main(["prove", str(tmp_path), *words])
    assert ended.value.code == 2 and why in capsys.readouterr().err
