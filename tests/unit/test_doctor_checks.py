# SPDX-License-Identifier: Apache-2.0
"""The doctor's judgements, from readings of machines that cannot all be here: GPUs, shared memory, nodes, overrides."""

from __future__ import annotations

import ast
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fresh_process import python
from verl_sync_plugin.cli.doctor import gpus, loading, machine, output, versions
from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning
from verl_sync_plugin.cli.doctor.overrides import lint, parse

ROOT = Path(__file__).resolve().parents[2]
SGLANG = "actor_rollout_ref.rollout.name=sglang"
ROLLOUT = "actor_rollout_ref.rollout"
H200 = {"name": "NVIDIA H200", "capability": "9.0", "total_bytes": 140 << 30}
READ: dict[str, Any] = {
    "torch_cuda": "13.0",
    "torch_hip": None,
    "driver": "580.1",
    "devices": [H200, H200],
    "no_peer_access": [],
    "cuda_ipc": "",
    "nvlinks": [18, 18],
}
FACTS: dict[str, Any] = {
    "gpu": READ,
    "variables": dict.fromkeys((*machine.ALLOCATOR_VARIABLES, machine.CUMEM)),
    "shm_bytes": {"size": 64 << 30, "free": 60 << 30},
    "limits": {"nofile": None, "memlock": None, "nproc": None},
    "infiniband": True,
}


def bad(found: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in found if each.level != "ok"}


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = machine.check(FACTS)
    assert not bad(found)
    texts = {each.check: each.text for each in found}
    assert texts["gpu"] == "2 × NVIDIA H200 of 140 GiB; driver 580.1, CUDA 13.0 in torch"
    assert texts["peer-access"] == "each of 2 GPUs reaches the others' memory"
    assert texts["nvlink"] == "active links by GPU: 18, 18"


@pytest.mark.parametrize(
    ("change", "check", "level", "text", "remedy"),
    [
        ({"devices": []}, "gpu", "problem", "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        ({"devices": [], "torch_cuda": None}, "gpu", "problem", "a build without CUDA", "install the torch"),
        ({"devices": [], "driver": None}, "gpu", "warning", "only starts runs", "--ray"),
        ({"devices": [], "driver": None, "torch_cuda": None}, "gpu", "warning", "for CPUs", "VERL_PLATFORM=cpu"),
        ({"devices": [H200, {**H200, "name": "A10"}]}, "gpu", "warning", "different GPUs", "of one kind"),
        ({"no_peer_access": [[0, 1], [1, 0]]}, "peer-access", "warning", "0→1, 1→0", "nvidia-smi topo"),
        ({"cuda_ipc": "RuntimeError: CUDA error: invalid"}, "cuda-ipc", "problem", "CUDA error: invalid", "--ipc=host"),
    ],
)
def test_gpus(
    change: dict[str, Any], check: str, level: str, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = bad(gpus.check(READ | change, on_cpu=False)).values()
    assert (found.check, found.level) == (check, level) and text in found.text and remedy in found.remedy


def test_nvlink_unknown_is_said() -> None:
    (found,) = (each for each in gpus.check(READ | {"nvlinks": None}, False) if each.check == "nvlink")
    assert found.text.startswith("unknown: the package nvidia-ml-py")


@pytest.mark.parametrize(
    ("path", "value", "check", "level", "remedy"),
    [
        (("shm_bytes",), {"size": 64 << 20, "free": 64 << 20}, "shm", "problem", "--shm-size"),
        (("shm_bytes",), {"size": 64 << 30, "free": 1 << 20}, "shm", "warning", "ls -la /dev/shm"),
        (("shm_bytes",), None, "shm", "warning", "mount a tmpfs"),
        (("limits", "nproc"), 512, "ulimit/nproc", "warning", "ulimit -u"),
        (("limits", "memlock"), 65536, "ulimit/memlock", "warning", "memlock=-1"),
        (("variables", "PYTORCH_ALLOC_CONF"), "expandable_segments : True", "expandable-segments", "problem", "take"),
    ],
)
def test_machine(path: tuple[str, ...], value: Any, check: str, level: str, remedy: str) -> None:
    facts: Any = deepcopy(FACTS)
    holder = facts
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (found,) = bad(machine.check(facts)).values()
    assert (found.check, found.level) == (check, level) and remedy in found.remedy


def test_this_machine_can_be_read() -> None:
    facts = machine.facts()
    assert facts["gpu"]["devices"] == [] and facts["cpus"] >= 1 and facts["shm_bytes"]["size"] > 0
    assert facts.keys() >= FACTS.keys() and facts["gpu"].keys() == READ.keys()


@pytest.mark.parametrize(
    ("value", "level"),
    [("auto", ""), ("verl_sync_plugin", ""), ("a,verl_sync_plugin", ""), ("a,b", "problem"), ("NONE", "problem")],
)
def test_whitelist_is_read_as_verl_reads_it(value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", value)
    found = bad(loading.check_entry_points()).get("whitelist")
    assert (found.level if found else "") == level


def test_engine_hooks_need_a_gpu_to_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {"active": False, "text": "ImportError: libcuda.so.1", "holder": "", "missing": "", "file": "/x/sgl.py"}
    result = {"verl": {"version": "0.9.1"}, "plugin": {"loaded": True, "file": "f"}, "hooks": {"rollout-adapter": hook}}
    monkeypatch.setenv("VERL_PLATFORM", "")
    (found,) = bad(loading.check_hooks(result, True, gpus=0)).values()
    assert found.level == "warning" and "on a node with GPUs" in found.remedy
    (found,) = bad(loading.check_hooks(result, True, gpus=1)).values()
    assert found.level == "problem" and "/x/sgl.py" in found.remedy


def test_verl_that_ends_its_process() -> None:
    (found,) = loading.check_hooks({"crashed": "exit status -11: nothing on stderr"}, True, 0)
    assert found.level == "problem" and "exit status -11" in found.text
    (found,) = loading.check_hooks({"verl": {"error": "ImportError: x"}, "plugin": {"loaded": False}}, True, 0)
    assert "verl cannot be imported: ImportError: x" in found.text


def test_two_installations_of_verl() -> None:
    here = versions.installed()
    found = bad(versions.judge(here, {"verl": "0.8.0"}))
    assert "the code that is imported says 0.8.0" in found["version/verl"].text
    assert not bad(versions.judge(here, {"verl": "0.9.1"}))


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.8.0", "problem"), ("0.9.0", ""), ("0.9.1", ""), ("0.10.0.dev0", "warning"), ("0.11.0", "problem")],
)
def test_verl(version: str, level: str) -> None:
    found = bad(versions.judge({**versions.installed(), "verl": version}, {"verl": version}))
    assert [each.level for each in found.values()] == ([level] if level else [])


def test_a_development_version_is_one_version_however_it_is_spelled() -> None:
    """verl's own says ``0.10.0.dev``, and its metadata, as pip writes them, ``0.10.0.dev0``."""
    found = bad(versions.judge({**versions.installed(), "verl": "0.10.0.dev0"}, {"verl": "0.10.0.dev"}))
    assert found["version/verl"].level == "warning" and "was not tried" in found["version/verl"].text


def test_a_megatron_that_cannot_be_imported_is_no_megatron_that_is_not_installed(tmp_path: Path) -> None:
    ended = python(
        tmp_path,
        """
        import sys
        sys.modules["megatron.core.package_info"] = None
        import verl
        from verl_sync_plugin.cli.doctor import hooks_probe
        print(hooks_probe._look(hooks_probe.megatron_engine))
        """,
    )
    found = ast.literal_eval(ended.stdout.splitlines()[-1])
    assert not found["active"] and found["missing"] == "megatron.core.package_info", ended.stderr
    finding = loading.check_hooks({"verl": {}, "plugin": {"loaded": True, "file": ""}, "hooks": {"m": found}}, True, 1)[
        1
    ]
    assert finding.level == "problem" and finding.remedy == "install what 'megatron' belongs to"


def test_differences_between_nodes() -> None:
    a, b = {"torch": "2.11", "peft": "1", "ray": "2"}, {"torch": "2.12", "peft": None, "ray": "2"}
    found = {each.check: each for each in versions.differences([("one", a), ("two", b), ("three", a)])}
    assert found.keys() == {"nodes/torch", "nodes/peft"}
    assert found["nodes/torch"].level == "problem" and "2.11 on one, three; 2.12 on two" in found["nodes/torch"].text
    assert found["nodes/peft"].level == "warning" and "none on two" in found["nodes/peft"].text


@pytest.mark.parametrize(
    ("overrides", "level", "text", "remedy"),
    [
        (f"{ROLLOUT}.dtype=int8", "problem", "dtype='int8': not a dtype of SGLang's weights", "bfloat16"),
        (
            f"{ROLLOUT}.custom.sync.delivery=broadcast",
            "problem",
            "gone; remove it",
            "delivery=staged",
        ),
        (f"{ROLLOUT}.bogus=1", "problem", "bogus", "+"),
        ("--config-name=nothing", "problem", "nothing", "correct the key"),
        ("--config-dir=/x", "problem", "--config-dir=/x: only overrides", "docs/doctor.md"),
        ("notakey", "problem", "notakey: not an override; use key=value", "docs/doctor.md"),
        ("a.b=[1", "problem", "a.b=[1", "correct"),
        (f"{ROLLOUT}.name=vllm", "problem", "name=vllm: the plugin does not serve this rollout", "one of: sglang"),
        ("actor_rollout_ref.actor.strategy=veomni", "problem", "weight sync NOT IN USE", "leave that key out"),
        (f"{ROLLOUT}.custom.sync.enabled=False", "warning", "stock verl moves the weights", "leave out"),
        (f"{ROLLOUT}.mode=sync", "problem", "mode", "correct"),
        ("actor_rollout_ref.model.path=/no/such/model", "warning", "no such folder", "correct the path"),
        ("+sync=colocated", "", "", ""),
        ("--config-name ppo_megatron_trainer", "", "", ""),
    ],
)
def test_overrides_are_linted(overrides: str, level: str, text: str, remedy: str) -> None:
    words = [SGLANG, "actor_rollout_ref.model.path=some/name", *overrides.split()]
    found = bad([Finding(**each) for each in lint(words)["findings"]])
    assert [each.level for each in found.values()] == ([level] if level else []), found
    for each in found.values():
        assert text in each.text and remedy in each.remedy and "\n" not in each.text, each


def test_a_whole_command_is_taken_apart() -> None:
    command = parse(
        ["python3", "-m", "verl.trainer.main_ppo", "--config-name", "ppo_megatron_trainer", "a=1", "+b=2", "~c"]
    )
    assert (command.program, command.config, command.overrides) == (
        "main_ppo",
        "ppo_megatron_trainer",
        ("a=1", "+b=2", "~c"),
    )


def test_page_and_json() -> None:
    nodes = [
        {
            "node": "one",
            "address": "",
            "versions": {"verl": "0.9.1", "peft": None},
            "findings": [ok("a", "fine").as_dict()],
        },
        {
            "node": "two",
            "address": "10.0.0.2",
            "versions": {},
            "findings": [problem("b", "broken", "mend it").as_dict()],
        },
    ]
    found = output.result(nodes, [warning("nodes/x", "differs", "align")])
    assert (found["ready"], found["level"], found["problems"], found["warnings"]) == (False, "problem", 1, 1)
    text = output.as_text(found)
    for part in (
        "two, 10.0.0.2",
        "PROBLEM  b: broken",
        "→ mend it",
        "WARNING  nodes/x: differs",
        "not ready: 1 problem",
    ):
        assert part in text
    assert output.as_text(output.result(nodes[:1], [])).endswith("\nready")


def test_json_and_checks_are_documented() -> None:
    text = (ROOT / "docs/doctor.md").read_text()
    keys = {*output.result([], []), "node", "address", "versions", "machine", "run", *ok("a", "b").as_dict()}
    checks = {each.check for each in (*machine.check(FACTS), *loading.check_entry_points())}
    missing = [word for word in sorted(keys | checks) if f"`{word}`" not in text]
    assert not missing
