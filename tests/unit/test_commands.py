# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor`` on the healthy stack and in environments that are really broken, and its judgements of machines
that cannot all be here; and what ``verl-sync prove`` refuses. Its proofs: ``tests/e2e/test_prove.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fresh_process import broken, doctor, first_in_path, other_plugin, stand_in
from verl_sync_plugin.cli import doctor as made
from verl_sync_plugin.cli import main, probe
from verl_sync_plugin.cli.doctor import Finding, ok, problem, warning

ROOT = Path(__file__).resolve().parents[2]
SGLANG, ROLLOUT = "actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout"
COMMAND = f"python -m verl.trainer.main_ppo {SGLANG} actor_rollout_ref.actor.strategy=fsdp2 {ROLLOUT}.dtype=bfloat16"
READ: dict[str, Any] = {
    "gpus": ["NVIDIA H200", "NVIDIA H200"], "driver": True, "torch_device": "13.0", "no_peer_access": [],
    "cuda_ipc": "", "variables": dict.fromkeys((*made.ALLOCATOR_VARIABLES, made.CUMEM)),
    "shm_bytes": {"size": 64 << 30, "free": 60 << 30}, "nofile": None,
}  # fmt: skip
EXPANDABLE = "expandable-segments"
real = pytest.mark.timeout(400)


def bad(found: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in found if each.level != "ok"}


@pytest.mark.slow
@real
def test_healthy_stack_is_ready(tmp_path: Path, tiny_model: Any) -> None:
    """With a whole command that was pasted, whose model is there; in the quickstart's environment, and without
    ``VERL_PLATFORM``."""
    model = f"actor_rollout_ref.model.path={tiny_model('qwen2')}"
    told = doctor(tmp_path, "--", *COMMAND.split(), model, f"{ROLLOUT}.quantization=fp8", VERL_PLATFORM="")
    assert told.code == 0 and told.found["ready"] and not told.bad, told.bad
    assert told.findings["hooks"]["text"] == f"{len(probe.HOOKS)} hooks of verl and SGLang are ours"
    assert not [check for check in told.findings if check.startswith("hook/")]
    assert told.findings["overrides"]["text"] == "weight sync on"
    # as the log of a run with it
    assert told.findings["model"]["text"].startswith("Qwen2ForCausalLM is served; a sync sends 27 tensors, 0.23 MB")
    assert told.findings["model"]["text"].endswith("the engine says which of them it keeps in fp8")
    assert told.findings["memory"]["text"] == (
        "per GPU about 0.12 MB in the engine, and at most 0.46 MB of staging where weights are not read in place; "
        "on the host no copy while the engine sleeps"
    )
    node = told.found["nodes"][0]
    assert node["versions"]["verl"] == "0.9.1" and node["machine"].keys() >= READ.keys()
    text = (ROOT / "docs/doctor.md").read_text()
    words = {*told.found, *node, *node["findings"][0], *(check for check in told.findings if "/" not in check)}
    assert [word for word in sorted(words) if f"`{word}`" not in text] == [], "they are documented"


@pytest.mark.parametrize(
    ("value", "modules", "remedy"),
    [
        ("none", "", "VERL_USE_EXTERNAL_PLUGINS=verl_sync_plugin, or unset"),
        ("theirs, Other", "", "VERL_USE_EXTERNAL_PLUGINS=theirs,other,verl_sync_plugin, or unset"),
        ("none", made.VALUE, ""),
        ("theirs,verl_sync_plugin", "", ""),
    ],
)
def test_ways_by_which_verl_finds_the_plugin(
    value: str, modules: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(made.POLICY, value)
    monkeypatch.setenv(made.MODULES, modules)
    found = bad([*made.check_entry_points()])
    assert {check: each.level for check, each in found.items()} == ({"whitelist": "problem"} if remedy else {})
    assert all(remedy in each.remedy for each in found.values())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])  # PYTHONPATH instead of pip
    assert bad([*made.check_entry_points()])["entry-point"].level == ("warning" if modules else "problem")


FIRST = 'from verl.workers.rollout.base import _ROLLOUT_REGISTRY as known; known["sglang", "async"] = "other_plugin.A"'
LATER = """
    import sys
    import wrapt

    sys.modules["megatron.core.package_info"] = None

    class Stranger: ...

    def later(_):
        import verl.trainer.ppo.v1, verl.workers.rollout.base, verl.checkpoint_engine.base
        verl.workers.rollout.base._ROLLOUT_REGISTRY["sglang", "async"] = "other_plugin.Stranger"
        verl.checkpoint_engine.base.CheckpointEngineRegistry._registry["sync_plugin"] = Stranger
        verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY["sync"] = Stranger

    wrapt.register_post_import_hook(later, "verl_sync_plugin.hooks.engines")
    """


LEAVE_OUT = f"uninstall one of the two plugins, or leave the other one out: {made.POLICY}=verl_sync_plugin"
STRANGER, BROKEN, AGAIN = (
    "other_plugin.Stranger (of other-plugin)",
    "ImportError: broken on purpose",
    "pip install --force-reinstall",
)


@pytest.mark.slow
@real
def test_a_plugin_that_is_not_loaded_no_cluster_and_another_version(tmp_path: Path) -> None:
    path = os.pathsep.join((str(other_plugin(tmp_path, FIRST)), stand_in(tmp_path, "sglang", "0.5.9")))
    told = doctor(tmp_path, "--ray", "127.0.0.1:1", "--", SGLANG, PYTHONPATH=path)
    assert told.code == 1 and told.bad == dict.fromkeys(("version/sglang", "import", "ray"), "problem")
    assert "already taken by 'other_plugin.A'" in told.findings["import"]["text"]
    assert told.findings["import"]["remedy"] == LEAVE_OUT
    assert "127.0.0.1:1" in told.findings["ray"]["text"] and "ray start --head" in told.findings["ray"]["remedy"]
    old = told.findings["version/sglang"]
    assert old["text"] == "sglang 0.5.9: sglang 0.5.12 or newer is needed" and "sglang==0.5.12" in old["remedy"]
    assert told.found["nodes"][0]["run"]["line"] == "not looked at, since verl does not load the plugin here"


@pytest.mark.slow
@real
def test_hooks_that_are_not_active(tmp_path: Path) -> None:
    """Another plugin took some later, a module of ours is broken, and a Megatron is installed that cannot be
    imported."""
    site, ours = other_plugin(tmp_path, LATER), broken(tmp_path, "rollouts/sglang/loader.py")
    told = doctor(tmp_path, PYTHONPATH=os.pathsep.join((str(site), first_in_path(ours))))
    taken = [f"hook/{name}" for name in ("checkpoint-engine", "trainers", "rollout-adapter")]
    failed = {"hook/engine-loader": (BROKEN, AGAIN), "hook/megatron-engine": ("", "install what 'megatron' belongs to")}
    assert told.code == 1 and told.bad == dict.fromkeys((*taken, *failed), "problem")
    for check, (text, remedy) in {**dict.fromkeys(taken, (STRANGER, LEAVE_OUT)), **failed}.items():
        assert text in told.findings[check]["text"] and remedy in told.findings[check]["remedy"]


@pytest.mark.slow
@pytest.mark.extended
@real
def test_a_broken_plugin_is_to_be_installed_again(tmp_path: Path) -> None:
    told = doctor(tmp_path, PYTHONPATH=first_in_path(broken(tmp_path, "compat.py")))
    assert told.code == 1 and told.bad == {"import": "problem"}
    assert BROKEN in told.findings["import"]["text"] and AGAIN in told.findings["import"]["remedy"]


@pytest.mark.parametrize(
    ("change", "check", "level", "text", "remedy"),
    [
        ({"gpus": []}, "gpu", "problem", "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": [], "torch_device": None}, "gpu", "problem", "a build without CUDA", "install the torch"),
        ({"gpus": [], "driver": False}, "gpu", "warning", "only starts runs", "--ray"),
        ({"no_peer_access": ["0→1", "1→0"]}, "peer-access", "warning", "0→1, 1→0", "nvidia-smi topo"),
        ({"cuda_ipc": "RuntimeError: CUDA error: invalid"}, "cuda-ipc", "problem", "CUDA error: invalid", "--ipc=host"),
        ({"shm_bytes": {"size": 64 << 20, "free": 64 << 20}}, "shm", "problem", "0.1 GiB", "--shm-size"),
        ({"shm_bytes": {"size": 64 << 30, "free": 1 << 20}}, "shm", "warning", "0.0 GiB", "ls -la /dev/shm"),
        ({"variables": {"PYTORCH_ALLOC_CONF": "a, expandable_segments : True"}}, EXPANDABLE, "problem", "", "take"),
        ({"variables": {"NCCL_CUMEM_ENABLE": "1"}}, "nccl-cumem", "warning", "sets it to 0", "unset"),
        ({"nofile": 512}, "ulimit/nofile", "warning", "nofile is 512", "ulimit -n 65536"),
    ],
)
def test_machine(change: dict[str, Any], check: str, level: str, text: str, remedy: str) -> None:
    assert not bad([*made.check_machine(READ, on_cpu=False)])
    read = deepcopy(READ) | change
    read["variables"] = READ["variables"] | read["variables"]
    (found,) = bad([*made.check_machine(read, on_cpu=False)]).values()
    assert (found.check, found.level) == (check, level) and text in found.text and remedy in found.remedy


def hooks_of(versions: dict[str, str | None] | None = None, **hooks: Any) -> dict[str, Finding]:
    return bad([*probe.check_hooks(hooks, made.installed() | (versions or {}))])


def raising(code: str, file: str = "/x.py") -> Callable[[], Any]:
    """A hook that fails in a file; what it names need not be there."""
    return lambda: exec(compile(f"raise {code}", file, "exec"))


FAILS = {
    ("ImportError('libcuda.so.1')", "/x/site-packages/sgl_kernel/y.py"): "install a sgl_kernel that fits the torch",
    ("ImportError('x')", "/x/verl_sync_plugin/y.py"): "pip install --force-reinstall",
    ("AssertionError('Key already registed')", "/x.py"): "uninstall one of the two plugins",
    ("ModuleNotFoundError('No module', name='megatron.core.x')", "/x.py"): "install what 'megatron' belongs to",
}


def test_what_to_do_about_a_hook_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of the engine need a GPU to be judged."""
    for where, remedy in FAILS.items():
        (found,) = hooks_of(trainers=raising(*where)).values()
        assert (found.check, found.level) == ("hook/trainers", "problem") and remedy in found.remedy
    monkeypatch.setenv(made.PLATFORM, "")
    (found,) = hooks_of(**{"rollout-adapter": raising(*where)}).values()
    assert found.level == "warning" and "on a node with GPUs" in found.remedy


def test_one_cause_is_one_finding() -> None:
    """A torchvision that does not fit torch keeps transformers, and with it most hooks, from being imported."""
    nms = compile("raise RuntimeError('nms')", "/x/site-packages/torch/library.py", "exec")
    vision = compile("exec(nms)", "/x/site-packages/torchvision/ops.py", "exec")

    def hook() -> None:
        try:
            exec(vision, {"nms": nms})
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'A'") from error

    hooks = {"hydra-keys": tuple, "trainers": hook, "rollout-adapter": hook}
    absent = raising("ModuleNotFoundError('No module', name='sglang.srt')")
    (found,) = hooks_of({"sglang": None}, **hooks, **{"rollout-replica": absent}).values()
    assert (found.check, found.level) == ("hook/trainers", "problem")
    assert found.text.startswith("not active, nor rollout-adapter: ModuleNotFoundError: Could not import module 'A'")
    assert "RuntimeError: nms" in found.text and found.remedy.startswith("install a torchvision that fits the torch")
    assert "hook/rollout-replica" in hooks_of({"sglang": "0.5.12"}, **hooks, **{"rollout-replica": absent})


@pytest.mark.parametrize(
    ("given", "change", "platform"),
    [
        (None, {"torch_device": None, "gpus": []}, "cpu"), ("", {"torch_device": None, "gpus": []}, "cpu"),
        ("CPU ", {}, "cpu"), (None, {}, ""), (None, {"gpus": []}, ""), ("nvidia", {"torch_device": None}, "nvidia"),
    ],
)  # fmt: skip
def test_the_quickstarts_environment_needs_no_variable(
    given: str | None, change: dict[str, Any], platform: str
) -> None:
    assert made.platform_of(given, READ | change) == platform


@pytest.mark.parametrize(
    ("package", "version", "level"),
    [
        ("verl", "0.8.0", "problem"), ("verl", "0.9.0", ""), ("verl", "0.9", ""), ("verl", "0.10.0.dev0", "warning"),
        ("verl", "0.9.1+ours", ""), ("verl", "0.11.0", "problem"), ("verl", "0.10.0rc1", "warning"),
        ("verl", "of-our-own", "problem"), ("sglang", "0.5.9", "problem"), ("sglang", "0.5.17", "warning"),
        ("sglang", "0.5.23", ""),
    ],
)  # fmt: skip
def test_versions(package: str, version: str, level: str) -> None:
    """verl's own says ``0.10.0.dev``, and its metadata, as pip writes them, ``0.10.0.dev0``: that is one version."""
    here = {**made.installed(), package: version}
    imported: made.Versions = {package: version.removesuffix("0") if "dev" in version else version}
    found = bad([*made.check_versions(here, imported)])
    assert [each.level for each in found.values()] == ([level] if level else [])
    found = bad([*made.check_versions(made.installed(), {"verl": "0.8.0"})])
    assert "the code that is imported says 0.8.0" in found["version/verl"].text


def test_differences_between_nodes() -> None:
    a, b = {"torch": "2.11", "peft": "1", "ray": "2"}, {"torch": "2.12", "peft": None, "ray": "2"}
    found = {each.check: each for each in made.differences([("one", a), ("two", b), ("three", a)])}
    assert found.keys() == {"nodes/torch", "nodes/peft"}
    assert found["nodes/torch"].level == "problem" and "2.11 on one, three; 2.12 on two" in found["nodes/torch"].text
    assert found["nodes/peft"].level == "warning" and "none on two" in found["nodes/peft"].text
    one, two = {"verl": "0.10.0.dev", "python": "3.12"}, {"verl": "0.10.0.dev0", "python": "3.12.0"}
    assert made.differences([("one", one), ("two", two)]) == [], "as PEP 440 compares them"
    one, two = {made.PLUGIN: "0.2.0 (1a2b3c4d5e6f)"}, {made.PLUGIN: "0.2.0 (0a2b3c4d5e6f)"}
    (differ,) = made.differences([("one", one), ("two", two)])
    assert differ.level == "problem" and "0.2.0 (1a2b3c4d5e6f) on one" in differ.text


@pytest.mark.parametrize(
    ("override", "level", "text", "remedy"),
    [
        (f"{ROLLOUT}.dtype=int8", "problem", "dtype='int8': not a dtype of SGLang's weights", "bfloat16"),
        (f"{ROLLOUT}.custom.sync.timeout_secs=3", "problem", "timeout_secs=3: unknown key", "sync.timeout_seconds"),
        (f"{ROLLOUT}.bogus=1", "problem", "bogus", "+"),
        ("--config-name=nothing", "problem", "nothing", "correct key"),
        ("--config-dir=/x", "problem", "--config-dir=/x: only overrides", "Leave it out"),
        ("notakey", "problem", "notakey", "correct key or value"),
        (f"{ROLLOUT}.name=vllm", "problem", "name=vllm: the plugin does not serve this rollout", "one of: sglang"),
        ("actor_rollout_ref.actor.strategy=veomni", "problem", "weight sync NOT IN USE", "leave that key out"),
        (f"{ROLLOUT}.custom.sync.enabled=False", "warning", "stock verl moves the weights", "leave out"),
        ("actor_rollout_ref.model.path=/no/such/model", "warning", "no such folder", "correct the path"),
        ("+sync=colocated", "", "", ""),  # and no word of verl's default model, which nobody named
        ("actor_rollout_ref.model.path=Nobody/model", "warning", "is not known here", "hf download Nobody/model"),
    ],
)
def test_overrides(override: str, level: str, text: str, remedy: str) -> None:
    found = bad([Finding(**each) for each in probe.lint([SGLANG, override])["findings"]])
    assert [each.level for each in found.values()] == ([level] if level else []), found
    for each in found.values():
        assert text in each.text and remedy in each.remedy and "\n" not in each.text, each


def test_a_whole_command_is_taken_apart() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", "--config-name", "ppo_megatron_trainer", "a=1", "+b=2", "~c"]
    assert probe.parse(words) == ("main_ppo", "ppo_megatron_trainer", ["a=1", "+b=2", "~c"])
    assert probe.parse(["x/main.py", "-cn", "y.yaml", "a=1"]) == ("main", "y", ["a=1"])


def test_page() -> None:
    one = {"node": "one", "address": "", "versions": {"verl": "0.9.1", "peft": None}, "findings": [vars(ok("a", "b"))]}
    two = {"node": "two", "address": "10.0.0.2", "versions": {}, "findings": [vars(problem("b", "broken", "mend it"))]}
    found = made.result([one, two], [warning("nodes/x", "differs", "align")])
    assert (found["ready"], found["level"], found["problems"], found["warnings"]) == (False, "problem", 1, 1)
    text = made.as_text(found)
    parts = ("two 10.0.0.2", "PROBLEM  b: broken", "→ mend it", "WARNING  nodes/x: differs", "not ready, problems: 1")
    assert all(part in text for part in parts), text
    assert "\nready, " in made.as_text(made.result([one], []))


# ``verl-sync prove``


def test_what_ends_the_run_for_want_of_memory_is_a_failed_check_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the way to the device; as JSON alone on the standard output, and as a table."""
    (tmp_path / "config.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert main(["prove", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (check,) = found["checks"]
    assert not found["passed"] and not check["passed"] and (found["compared"], found["not_comparable"]) == (0, 0)
    assert check["found"].startswith("loading the trainer's model failed. rank 0: torch.OutOfMemoryError: CUDA out of")
    assert "Tried to allocate 1.02 GiB. Give the trainer's model more room: --trainer-dtype bfloat16" in check["found"]
    assert main(["prove", str(tmp_path)]) == 1
    row, _, last = capsys.readouterr().out.splitlines()[-3:]
    assert "  FAILED  " in row and last == "NOT proven"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "no folder with a config.json"),
        ([".", "--syncs", "0"], "--syncs 0: use 1 or more"),
        ([".", "--tp", "2"], "torchrun --nproc-per-node 2"),
    ],
)
def test_refused(words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["prove", *[str(tmp_path) if word == "." else word for word in words]])
    assert ended.value.code == 2 and why in capsys.readouterr().err
