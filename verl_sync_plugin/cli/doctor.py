# SPDX-License-Identifier: Apache-2.0
"""``verl-sync doctor``: will the plugin move the weights here, and what of the machine stands in its way?

``probe.py`` imports in a fresh process whatever a broken installation could lack. Here is only what decides about a
sync; ``python -m sglang.check_env`` and ``python -m torch.utils.collect_env`` say more of the machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from platform import python_version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_version
from packaging.version import InvalidVersion

from verl_sync_plugin import build
from verl_sync_plugin.compat import version_of

OK, WARNING, PROBLEM = LEVELS = ("ok", "warning", "problem")  # from harmless to grave
SCHEMA = 2  # of the JSON; raised when a key changes its meaning or goes
POINT, VALUE = "verl_sync_plugin", "verl_sync_plugin.plugin"  # name and value of our entry point
POLICY, MODULES, PLATFORM = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"
PROBE_SECONDS, NODE_SECONDS, IPC_SECONDS, CONNECT_SECONDS = 600, 900, 120, 10
PLUGIN, CPU_STACK = "verl-sync-plugin", "verl-sync-cpu-stack"
PACKAGES = (
    "verl", "sglang", "torch", "transformers", "ray", "hydra-core", "torch-memory-saver", "triton", "peft",
    "megatron-core", "megatron-bridge",
)  # fmt: skip
# Where nodes must have the same: what travels between their processes, or is computed alike on all
SAME_EVERYWHERE = (PLUGIN, "python", "verl", "sglang", "torch", "transformers", "ray", "megatron-core")
TRIED_SGLANG = ">=0.5.12,<=0.5.23,!=0.5.15,!=0.5.16,!=0.5.17,!=0.5.18,!=0.5.19"  # docs/releases.md
# What the plugin is made for, what of that its tests ran with, and the remedy for anything else
RANGES = {
    "verl": (">=0.9,<0.11", ">=0.9,<=0.9.1", "pip install verl==0.9.1"),
    "sglang": (">=0.5.12", TRIED_SGLANG, "pip install sglang==0.5.12 && pip install verl==0.9.1 transformers==5.9.0"),
}
ALLOCATOR_VARIABLES, CUMEM = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "NCCL_CUMEM_ENABLE"
SHM, LEAST_SHM_GIB = Path("/dev/shm"), 1.0  # Docker gives 64 MiB; NCCL and Ray's object store need more
LEAST_FILES = 4096  # Ray warns below 65536; SGLang, Ray and the connections of a sync together need thousands
NOT_LOADED = "importing verl does not load the plugin, so stock verl moves the weights"
OPEN_IPC = """
import pickle, sys, torch
from verl_sync_plugin.transport.memory import Regions
slots, regions = pickle.load(sys.stdin.buffer), Regions()
regions.map([slots.region])
flat = regions.slot(slots, 0)
assert int(flat.sum().item()) == flat.numel() * 0x5A, "read other bytes than were written"
"""
Finding = dict[str, str]
Versions = Mapping[str, str | None]


def finding(level: str, check: str, text: str, remedy: str = "") -> Finding:
    """One line of the doctor's, by docs/doctor.md. ``remedy`` is empty where nothing is to be done."""
    assert remedy or level == OK, text
    return {"level": level, "check": check, "text": text, "remedy": remedy}


ok, warning, problem = (partial(finding, level) for level in LEVELS)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check whether the plugin is active in this environment, and what on this machine stands in its way",
        description="Loads every hook in a fresh process as verl would, and looks at GPUs, variables and limits. Each "
        "finding that is not ok has a remedy. The exit code is 1 where there is a problem, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead (docs/doctor.md)")
    parser.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="also every node of a Ray cluster")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="COMMAND", help="or overrides, to be checked")
    return parser


def run(arguments: argparse.Namespace) -> int:
    node = check_node([word for word in arguments.overrides if word != "--"])
    nodes, between = [{"node": f"this machine ({os.uname().nodename})", "address": "", **node}], []
    if arguments.ray is not None:
        try:
            nodes += check_cluster(arguments.ray)
            between = differences({each["node"]: each["versions"] for each in nodes if each["versions"]})
        except ConnectionError as error:
            remedy = "ray start --head, or give its address: --ray HOST:6379"
            between = [problem("ray", f"no Ray cluster at {error}", remedy)]
    found = result(nodes, between)
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else as_text(found))
    return 0 if found["ready"] else 1


def check_node(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Looks at this machine and environment. Returns a node of the JSON (docs/doctor.md) but for name and address."""
    versions = installed()
    if not versions["torch"]:
        remedy = "install the plugin into the environment that runs verl and SGLang"
        found = [problem("version/torch", f"torch is not installed in {sys.prefix}", remedy)]
        return {"versions": versions, "machine": None, "run": None, "findings": found}
    machine = read_machine()
    platform = os.environ.get(PLATFORM, "").strip().lower()
    # The quickstart's environment needs no variable
    if not (platform or machine["gpus"] or machine["torch_device"]) and version_of(CPU_STACK):
        platform = "cpu"
    probed = probe(overrides, {PLATFORM: platform} if platform else {})
    found = [*check_versions(versions, probed["verl"]), *check_entry_points()]
    # What keeps verl from loading the plugin explains by itself why it is not loaded
    explained = any(each["level"] == PROBLEM and each["check"] != "version/sglang" for each in found)
    found += [each for each in probed["findings"] if not (explained and each["text"] == NOT_LOADED)]
    found += check_machine(machine, platform == "cpu")
    if machine["gpus"] and versions["torch-memory-saver"] is None:
        text = "torch-memory-saver is not installed: the engine cannot give its memory to the trainer"
        found.append(problem("version/torch-memory-saver", text, "pip install torch-memory-saver"))
    lint = probed["run"] or {"line": "not looked at, since verl does not load the plugin here", "findings": []}
    found += lint["findings"]
    return {"versions": versions, "machine": machine, "run": lint if overrides else None, "findings": found}


def installed() -> dict[str, str | None]:
    """The version of each package, ``None`` where it is not installed; the plugin's with its commit."""
    return {PLUGIN: build(), "python": python_version(), **{name: version_of(name) or None for name in PACKAGES}}


def check_versions(versions: Versions, imported: str | None) -> Iterator[Finding]:
    """Judges the versions of the packages' metadata, and the ``__version__`` of the verl that a process imports."""
    for package, (accepted, tried, remedy) in RANGES.items():
        check, version = f"version/{package}", versions[package]
        if version is None:
            yield problem(check, f"{package} is not installed", remedy)
            continue
        code = imported if package == "verl" and imported else version
        if len({canonicalize_version(each).partition("+")[0] for each in (version, code)}) > 1:  # but for local labels
            text = f"the metadata of {package} says {version}, but the code that is imported says {code}"
            yield problem(check, text, f"keep one installation of {package}: {remedy}")
        if not _within(accepted, version):
            least, _, below = accepted.removeprefix(">=").partition(",<")
            needed = f"{package} {least} or newer" + (below and f", and older than {below},")
            yield problem(check, f"{package} {version}: {needed} is needed", remedy)
        elif not _within(tried, version):
            text = f"{package} {version} is within {accepted}, but was not tested ({package}{tried} was)"
            yield warning(check, text, f"run a few steps and look at sync/coverage_missing, or {remedy}")
        else:
            yield ok(check, f"{package} {version}")


def _within(specifiers: str, version: str) -> bool:
    try:
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except InvalidVersion:  # a build of one's own
        return False


def check_entry_points() -> Iterator[Finding]:
    """The ways by which verl finds the plugin: the entry point, and verl's variables."""
    ours = [point.name for point in importlib.metadata.entry_points(group="verl.plugins") if point.value == VALUE]
    by_module, name = VALUE in os.environ.get(MODULES, "").split(","), ours[0] if ours else POINT
    if ours:
        yield ok("entry-point", f"{name} = {VALUE} in verl.plugins")
    elif by_module:
        text = f"{MODULES} loads the plugin; it has no entry point in verl.plugins"
        yield warning("entry-point", text, f"pip install the plugin, or set {MODULES} on every node, too")
    else:
        text = "no entry point in the group verl.plugins: the plugin is importable, but was not installed with pip"
        yield problem("entry-point", text, "pip install . in its checkout, instead of PYTHONPATH")
    value = os.environ.get(POLICY, "auto")
    allowed = [word.strip() for word in value.lower().split(",") if word.strip()]  # read as verl reads it
    if not by_module and allowed != ["auto"] and name not in allowed:
        also = ",".join([*(word for word in allowed if word != "none"), name])
        text = f"{POLICY}={value}: verl loads only the plugins that it names, and {name} is not among them"
        yield problem("whitelist", text, f"{POLICY}={also}, or unset {POLICY}")


def probe(overrides: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs ``probe.py`` in a fresh process with this environment on top; returns what it finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        words = "-m", "verl_sync_plugin.cli.probe", str(path), *overrides
        why = _failure(*words, seconds=PROBE_SECONDS, env={**os.environ, **environment})
        if path.is_file():
            return dict(json.loads(path.read_text()))
    text, remedy = f"a fresh process that imports verl ended: {why}", "look at the traceback of python -c 'import verl'"
    return {"verl": None, "run": None, "findings": [problem("import", text, remedy)]}


def _failure(*words: str, seconds: float, **more: Any) -> str:
    """Runs a Python with these arguments; why that failed, empty when it did not."""
    try:
        ended = subprocess.run([sys.executable, *words], capture_output=True, timeout=seconds, check=False, **more)
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds} s"
    said = ended.stderr.decode(errors="replace").strip().splitlines() or ["nothing on stderr"]
    return f"exit status {ended.returncode}: {said[-1]}" if ended.returncode else ""


def read_machine() -> dict[str, Any]:
    """Reads what a sync depends on; every value is plain, and ``None`` where it is unknown."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    pairs = itertools.permutations(range(count), 2)
    # What is free is not asked: that would make a CUDA context on every GPU, where a run may need the room
    return {
        "host": os.uname().nodename,
        "driver": Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        "torch_device": torch.version.cuda or torch.version.hip,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "no_peer_access": [f"{a}→{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)],
        "cuda_ipc": _ipc_error() if count else None,
        "variables": {name: os.environ.get(name) for name in (*ALLOCATOR_VARIABLES, CUMEM, "CUDA_VISIBLE_DEVICES")},
        "shm_bytes": {"size": shm.total, "free": shm.free} if shm else None,
        "nofile": None if files == resource.RLIM_INFINITY else files,
    }


def _ipc_error() -> str:
    """Hands memory of the first GPU to another process as a sync does; why that failed, empty when it did not."""
    import torch

    from verl_sync_plugin.transport.memory import Staging

    try:
        staging = Staging(torch.device("cuda", 0), 1, 1 << 20)
        staging.memory.fill_(0x5A)
        torch.cuda.synchronize(0)
        return _failure("-c", OPEN_IPC, seconds=IPC_SECONDS, input=pickle.dumps(staging.export))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def check_machine(read: Mapping[str, Any], on_cpu: bool) -> Iterator[Finding]:
    """Judges what ``read_machine`` has read."""
    if gpus := read["gpus"]:
        kinds = ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
        yield ok("gpu", f"{kinds}; CUDA {read['torch_device']}")
        if missing := read["no_peer_access"]:
            text = f"GPUs cannot read each other's memory ({', '.join(missing)}): syncs of several GPUs are slower"
            yield warning("peer-access", text, "look at nvidia-smi topo -p2p r, and turn off ACS in the BIOS or the VM")
        if read["cuda_ipc"]:
            remedy = "share the host's IPC and PID namespace (Docker: --ipc=host); trainer and engine in one container"
            yield problem("cuda-ipc", f"another process cannot open memory of GPU 0: {read['cuda_ipc']}", remedy)
        else:
            yield ok("cuda-ipc", "another process read what this one wrote on GPU 0")
    elif on_cpu:
        yield ok("gpu", "none is used: verl's platform here is the CPU")
    elif not read["driver"]:
        remedy = "run the doctor on a node with GPUs, or with --ray on all of a cluster; VERL_PLATFORM=cpu is for CPUs"
        yield warning("gpu", "no GPU and no driver on this machine: fine for a node that only starts runs", remedy)
    elif not read["torch_device"]:
        text = "there is a driver, but torch is a build without CUDA"
        yield problem("gpu", text, "install the torch that SGLang names, a build with CUDA")
    else:
        text = f"there is a driver, and torch with CUDA {read['torch_device']} sees no GPU"
        yield problem("gpu", text, "look at CUDA_VISIBLE_DEVICES, at the container's --gpus, and at nvidia-smi")
    variables, shm, files = read["variables"], read["shm_bytes"] or {"size": 0, "free": 0}, read["nofile"]
    for name in ALLOCATOR_VARIABLES:
        if re.search(r"expandable_segments:(true|1)\b", (variables[name] or "").replace(" ", "").lower()):
            text = f"{name}={variables[name]}: the engine's memory saver does not work with expandable segments, and a "
            text += "sync cannot read parameters where they lie"
            yield problem("expandable-segments", text, f"take expandable_segments:True out of {name}, on every node")
    if (value := variables[CUMEM]) not in (None, "0"):
        text = f"{CUMEM}={value}: verl sets it to 0 for the engine, and both ends of an NCCL group have to agree"
        yield warning("nccl-cumem", text, f"unset {CUMEM}, or set it to 0 on every node")
    size, free = shm["size"] / 2**30, shm["free"] / 2**30
    text = f"{SHM} has {size:.1f} GiB, {free:.1f} GiB of them free"
    if size < LEAST_SHM_GIB:
        yield problem("shm", text, "start the container with --shm-size=16g (Kubernetes: an emptyDir of medium Memory)")
    elif free < LEAST_SHM_GIB:
        yield warning("shm", text, f"remove what earlier runs left there: ls -la {SHM}")
    else:
        yield ok("shm", text)
    if files is not None and files < LEAST_FILES:
        text = f"ulimit: nofile is {files}, and the processes of a run need up to thousands"
        yield warning("ulimit/nofile", text, "ulimit -n 65536, before ray start or the run")
    else:
        yield ok("ulimit/nofile", "unlimited" if files is None else str(files))


def check_cluster(address: str) -> Iterator[dict[str, Any]]:
    """``check_node`` of every node alive of a Ray cluster, with its name (``node``) and ``address``; a finding says
    where a node cannot run it. Raises ConnectionError where there is no cluster, or it is of another version."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = address.rpartition(":")
    try:
        if host and "//" not in address and port.isdecimal():  # where nobody listens Ray would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=40)  # Python's ERROR
    except Exception as error:
        raise ConnectionError(f"{address}: {' '.join(str(error).split())[:300]}") from error
    # Ray hides all GPUs from a task that asks for none. verl's workers set this variable, too
    environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    try:
        remote: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment)(check_node)
        asked = [
            (node, remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], False)).remote())
            for node in ray.nodes()
            if node["Alive"]
        ]
        for node, future in asked:
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
            yield {"node": name, "address": node["NodeManagerAddress"], **_answer(ray, future)}
    finally:
        ray.shutdown()


def _answer(ray: Any, future: Any) -> dict[str, Any]:
    try:
        return dict(ray.get(future, timeout=NODE_SECONDS))
    except Exception as error:
        text = " ".join(str(error).split())
        why = f"the check did not end: {type(error).__name__}: {text[-300:]}"
        found = problem("node", why, "run verl-sync doctor on that node itself")
        if "No module named 'verl_sync_plugin" in text:
            found = problem("plugin", "the plugin is not installed on this node", "pip install it there")
        return {"versions": {}, "machine": None, "findings": [found]}


def differences(nodes: Mapping[str, Versions]) -> list[Finding]:
    """Packages of which nodes have different versions."""
    found = []
    for package in (PLUGIN, "python", *PACKAGES):
        there = defaultdict[str, list[str]](list)
        for node, versions in nodes.items():
            there[canonicalize_version(versions.get(package) or "none")].append(node)
        if len(there) > 1:
            level = problem if package in SAME_EVERYWHERE else warning
            text = "; ".join(f"{nodes[at[0]].get(package) or 'none'} on {', '.join(at)}" for at in there.values())
            remedy = f"install the same {package} on every node, or use one image"
            found.append(level(f"nodes/{package}", f"{package} differs between nodes: {text}", remedy))
    return found


def result(nodes: Sequence[Mapping[str, Any]], between: Sequence[Finding]) -> dict[str, Any]:
    """The whole result as plain values: of nodes, the first of which is this machine, and of none of them."""
    every = [each["level"] for findings in (between, *(node["findings"] for node in nodes)) for each in findings]
    return {
        "schema": SCHEMA,
        "plugin": build(),
        "ready": PROBLEM not in every,
        "level": max(every, key=LEVELS.index, default=OK),
        "problems": every.count(PROBLEM),
        "warnings": every.count(WARNING),
        "findings": between,
        "nodes": nodes,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """A page for people: each finding with its remedy; of several nodes only what is not ok."""
    lines, brief = [f"verl-sync-plugin {found['plugin']}"], len(found["nodes"]) > 1
    for node in (*found["nodes"], {"node": "all nodes", "findings": found["findings"]}):
        if findings := [each for each in node["findings"] if not brief or each["level"] != OK]:
            known = [f"{package} {version}" for package, version in node.get("versions", {}).items() if version]
            lines += ["", " ".join([node["node"], node.get("address", "")]).strip(), f"  {', '.join(known)}"]
        for each in findings:
            mark = each["level"] if each["level"] == OK else each["level"].upper()
            lines.append(f"  {mark:8} {each['check']}: {each['text']}")
            lines += [f"  {'':8}   → {each['remedy']}"] if each["remedy"] else []
        if (run := node.get("run")) and not run["findings"]:
            lines.append(f"  {'–':8} overrides: {run['line']}")
    counts = f"problems: {found['problems']}, warnings: {found['warnings']}"
    return "\n".join([*lines, "", f"{'ready' if found['ready'] else 'not ready'}, {counts}"])
