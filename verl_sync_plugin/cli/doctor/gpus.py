# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, and whether two processes can read each other's memory on them."""

from __future__ import annotations

import contextlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_sync_plugin.cli.doctor.findings import Finding, ok, problem, warning

DRIVER_FILE = Path("/proc/driver/nvidia/version")
IPC_SECONDS = 120
IPC_BYTES = 1 << 20
PATTERN = 0x5A
OPEN_IPC = """
import pickle, sys, torch
import verl_sync_plugin.transport.memory.cuda_ipc as cuda_ipc
with open(sys.argv[1], "rb") as file:
    flat = cuda_ipc.open_cuda_ipc(pickle.load(file))
assert int(flat.sum().item()) == flat.numel() * {pattern}, "read other bytes than were written"
"""


def facts() -> dict[str, Any]:
    """GPUs, driver, peer access, CUDA IPC and NVLink, as far as they can be read here."""
    import torch

    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    return {
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "driver": _driver(),
        "devices": [_device(index) for index in range(count)],
        "no_peer_access": [
            [one, other]
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ],
        "cuda_ipc": _ipc_error() if count else None,
        "nvlinks": _nvlinks() if count else None,
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(index)
    capability = f"{found.major}.{found.minor}"
    # What is free is not asked: that would make a CUDA context on every GPU, perhaps beside a run that needs the room
    return {"name": found.name, "capability": capability, "total_bytes": found.total_memory}


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver, ``None`` without one."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", DRIVER_FILE.read_text())
        return found[1] if found else "unknown"
    with _nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's management library; ``None`` where the package nvidia-ml-py, or a driver, is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _nvlinks() -> list[int] | None:
    """Active NVLinks by GPU of the machine (not only visible ones); ``None`` where nobody can tell."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        counts = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle, active = nvml.nvmlDeviceGetHandleByIndex(index), 0
            for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
                try:
                    active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
                except nvml.NVMLError:  # no such link on this GPU
                    break
            counts.append(active)
        return counts


def _ipc_error() -> str:
    """Hands memory of the first GPU to another process as a sync does; why that failed, empty when it did not."""
    import torch

    from verl_sync_plugin.transport.memory.cuda_ipc import CudaIpcStaging

    try:
        staging = CudaIpcStaging(torch.device("cuda", 0), 1, IPC_BYTES)
        staging.memory.fill_(PATTERN)
        torch.cuda.synchronize(0)
        with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
            file.write(pickle.dumps(staging.export()))
            file.flush()
            command = [sys.executable, "-c", OPEN_IPC.format(pattern=PATTERN), file.name]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=IPC_SECONDS, check=False)
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        return "" if ended.returncode == 0 else (said[-1] if said else f"exit status {ended.returncode}")
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def check(read: Mapping[str, Any], on_cpu: bool) -> list[Finding]:
    """Judges what ``facts`` has read."""
    if not read["devices"]:
        return [_check_absent(read, on_cpu)]
    return [_check_devices(read), _check_peers(read), _check_ipc(read), _check_nvlink(read)]


def _check_absent(read: Mapping[str, Any], on_cpu: bool) -> Finding:
    if on_cpu:
        return ok("gpu", "none is used: VERL_PLATFORM=cpu")
    if read["driver"] is None and read["torch_cuda"] is None and read["torch_hip"] is None:
        text = "no GPU and no driver on this machine, and torch is a build for CPUs: verl does not start here as it is"
        return warning(
            "gpu", text, "in the environment of make quickstart, put VERL_PLATFORM=cpu in front of the command"
        )
    if read["driver"] is None:
        text = "no GPU and no driver on this machine: fine for a node that only starts runs"
        return warning("gpu", text, "run the doctor on a node with GPUs, or with --ray on all nodes of a cluster")
    if read["torch_cuda"] is None and read["torch_hip"] is None:
        text = f"there is a driver ({read['driver']}), and torch is a build without CUDA"
        return problem("gpu", text, "install the torch that SGLang names, a build with CUDA")
    text = f"there is a driver ({read['driver']}), and torch with CUDA {read['torch_cuda']} sees no GPU"
    remedy = "look at CUDA_VISIBLE_DEVICES, at the container's --gpus, and whether the driver is new enough: nvidia-smi"
    return problem("gpu", text, remedy)


def _check_devices(read: Mapping[str, Any]) -> Finding:
    named: dict[str, int] = {}
    for device in read["devices"]:
        name = f"{device['name']} of {device['total_bytes'] / 2**30:.0f} GiB"
        named[name] = named.get(name, 0) + 1
    said = ", ".join(f"{count} × {name}" for name, count in named.items())
    text = f"{said}; driver {read['driver'] or 'unknown'}, CUDA {read['torch_cuda'] or read['torch_hip']} in torch"
    if len(named) > 1:
        return warning("gpu", f"different GPUs: {text}", "take GPUs of one kind: the smallest decides what fits")
    return ok("gpu", text)


def _check_peers(read: Mapping[str, Any]) -> Finding:
    count, missing = len(read["devices"]), read["no_peer_access"]
    if count == 1:
        return ok("peer-access", "one GPU")
    if not missing:
        return ok("peer-access", f"each of {count} GPUs reaches the others' memory")
    pairs = ", ".join(f"{one}→{other}" for one, other in missing[:6]) + (", …" if len(missing) > 6 else "")
    text = f"GPUs cannot read each other's memory ({pairs}): syncs of several GPUs are gathered, which is slower"
    return warning("peer-access", text, "look at nvidia-smi topo -p2p r, and turn off ACS in the BIOS or the VM")


def _check_ipc(read: Mapping[str, Any]) -> Finding:
    if not read["cuda_ipc"]:
        return ok("cuda-ipc", "another process read what this one wrote on GPU 0")
    text = f"another process cannot open memory of GPU 0: {read['cuda_ipc']}"
    remedy = "share the host's IPC and PID namespace (Docker: --ipc=host), and run trainer and engine in one container"
    return problem("cuda-ipc", text, remedy)


def _check_nvlink(read: Mapping[str, Any]) -> Finding:
    links = read["nvlinks"]
    if links is None:
        return ok("nvlink", "unknown: the package nvidia-ml-py is not installed")
    if len(read["devices"]) > 1 and not any(links):
        return ok("nvlink", "none is active: bytes of other GPUs come over PCIe")
    return ok("nvlink", f"active links by GPU: {', '.join(map(str, links))}")
