# SPDX-License-Identifier: Apache-2.0
"""Memory that another process sees; read on a GPU by ``bare_engine/test_flips_on_gpu.py``."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl_sync_plugin.transport.memory import CudaExporter, Regions, Staging

CPU, SLOT_BYTES = torch.device("cpu"), 48
HOLDS = """
import sys, torch
from verl_sync_plugin.transport.memory import Staging
staging = Staging(torch.device("cpu"), 2, 48)
print(staging.export.region.handle.decode(), flush=True)
sys.stdin.readline()
"""


def verl_sync_files() -> set[str]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(file) for folder in folders for file in folder.glob("*verl-sync*")}


def test_nothing_is_left_of_processes_that_nobody_has_read_from() -> None:
    before, pipe = verl_sync_files(), subprocess.PIPE
    command = [sys.executable, "-c", HOLDS]
    killed, ended = processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    paths = [process.stdout.readline().strip() for process in processes if process.stdout]
    assert all(map(os.path.exists, paths)) and verl_sync_files() == before, "not even while it is there"
    killed.kill()
    for process in (killed, ended):
        process.communicate("\n")
    assert verl_sync_files() == before and not any(map(os.path.lexists, paths))


def test_memory_outlives_its_owner_where_it_is_mapped() -> None:
    staging, regions = Staging(CPU, 2, SLOT_BYTES), Regions()
    memory, slots = staging.memory, staging.export
    regions.map([slots.region])
    staging.close()
    memory[:SLOT_BYTES], memory[SLOT_BYTES:] = 3, 4
    assert [set(regions.slot(slots, number).tolist()) for number in range(2)] == [{3}, {4}]


@pytest.mark.parametrize("closed", [True, False])
def test_its_file_is_closed_with_it(closed: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    staging = Staging(CPU, 1, SLOT_BYTES)
    region = staging.export.region
    if closed:
        staging.close()
    del staging
    assert not os.path.lexists(region.handle) and set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(FileNotFoundError, match=f"trainer's {SLOT_BYTES} bytes is not visible here"):
        Regions().map([region])


def test_other_memory_with_the_same_number_is_not_opened() -> None:
    """As in a container of its own; and as one in the place of the first, which may still be mapped."""
    stagings = [Staging(CPU, 1, SLOT_BYTES) for _ in range(2)]
    first, second = (staging.export.region for staging in stagings)
    for other in ({"handle": second.handle}, {"nbytes": 2 * SLOT_BYTES}):
        with pytest.raises(FileNotFoundError, match="is not visible here"):
            Regions().map([replace(first, **other)])
    stagings[0].close()
    again = Staging(CPU, 1, SLOT_BYTES).export.region
    assert again.handle == first.handle and again.key != first.key


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_open_it() -> None:
    staging = Staging(CPU, 1, SLOT_BYTES)
    code = f"import os; os.setgid(65534); os.setuid(65534); open({staging.export.region.handle.decode()!r})"
    assert "PermissionError" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestAllocations:
    def test_an_allocation_in_the_place_of_another_is_another(self) -> None:
        torch.cuda.empty_cache()
        exporter, tensor = CudaExporter(), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        address, (allocation, _) = tensor.data_ptr(), exporter.find(tensor)
        before, key = exporter.identities((allocation,)), exporter.export(allocation).key
        assert exporter.identities((allocation,)) == before
        del tensor
        torch.cuda.empty_cache()
        again = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        if again.data_ptr() == address:
            assert exporter.identities((allocation,)) != before and exporter.export(allocation).key != key

    def test_expandable_segments_cannot_be_exported(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        exporter = CudaExporter()
        with pytest.raises(RuntimeError, match="cuIpcGetMemHandle"):
            exporter.export(exporter.find(tensor)[0])
