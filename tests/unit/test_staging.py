"""Staging memory: what one process writes, another reads."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from verl_sync_plugin.transport.cuda_ipc import CudaIpcStaging
from verl_sync_plugin.transport.exports import StagingExport
from verl_sync_plugin.transport.staging import create_staging, open_staging, slot_of

WAIT = 60.0
SLOT_BYTES = 48


def sum_of_slots(export: StagingExport, go: object, answers: object) -> None:
    """The other process: maps once, then reads every time it is told to."""
    memory = open_staging(export)
    answers.put("open")  # type: ignore[attr-defined]
    while go.get(timeout=WAIT):  # type: ignore[attr-defined]
        slots = [slot_of(memory, slot, export.slot_bytes) for slot in range(2)]
        answers.put([int(slot.sum().item()) for slot in slots])  # type: ignore[attr-defined]


def check_in_second_process(device: torch.device) -> None:
    """Writes before and after the other process has opened the export; it must see both."""
    staging = create_staging(device, 2, SLOT_BYTES)
    context = multiprocessing.get_context("spawn")
    go, answers = context.Queue(), context.Queue()
    export = staging.export()
    reader = context.Process(target=sum_of_slots, args=(export, go, answers), daemon=True)
    reader.start()
    assert answers.get(timeout=WAIT) == "open"
    staging.opened()
    for value in (1, 2):
        slot_of(staging.memory, 0, SLOT_BYTES).fill_(value)
        slot_of(staging.memory, 1, SLOT_BYTES).fill_(10 * value)
        if device.type == "cuda":
            torch.cuda.synchronize()
        go.put(True)
        assert answers.get(timeout=WAIT) == [SLOT_BYTES * value, SLOT_BYTES * 10 * value]
    go.put(False)
    reader.join(WAIT)
    assert reader.exitcode == 0
    staging.close()


def test_second_process_sees_shared_memory() -> None:
    check_in_second_process(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_second_process_sees_device_memory() -> None:
    check_in_second_process(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_memory_is_exported_once() -> None:
    staging = CudaIpcStaging(torch.device("cuda", 0), 2, SLOT_BYTES)
    assert staging.export() == staging.export()
    staging.close()
    assert staging.memory.numel() == 0


def test_file_is_gone_once_opened() -> None:
    staging = create_staging(torch.device("cpu"), 2, SLOT_BYTES)
    (path,) = staging.export().handle
    assert Path(path).exists()
    mapped = open_staging(staging.export())
    staging.opened()
    assert not Path(path).exists()
    staging.memory.fill_(3)
    assert int(mapped.sum()) == 3 * 2 * SLOT_BYTES, "the mapping must outlive the file"
    staging.opened()
    staging.close()
    assert staging.memory.numel() == 0


def test_file_is_gone_after_close_without_receiver() -> None:
    staging = create_staging(torch.device("cpu"), 1, SLOT_BYTES)
    (path,) = staging.export().handle
    staging.close()
    assert not Path(path).exists()


def test_file_is_gone_with_its_owner() -> None:
    staging = create_staging(torch.device("cpu"), 1, SLOT_BYTES)
    (path,) = staging.export().handle
    del staging
    assert not Path(path).exists()


def test_file_is_readable_by_its_owner_only() -> None:
    staging = create_staging(torch.device("cpu"), 1, SLOT_BYTES)
    (path,) = staging.export().handle
    assert os.stat(path).st_mode & 0o077 == 0


def test_export_describes_the_memory() -> None:
    first, second = (create_staging(torch.device("cpu"), 2, SLOT_BYTES) for _ in range(2))
    export = first.export()
    assert (export.kind, export.nbytes, export.slot_bytes) == ("shared_memory", 2 * SLOT_BYTES, SLOT_BYTES)
    assert export == first.export()
    assert export.key != second.export().key, "a receiver tells memories apart by their keys"


def test_unknown_mechanism() -> None:
    with pytest.raises(ValueError, match="unknown staging mechanism 'pigeon'"):
        open_staging(StagingExport("pigeon", "k", 1, (), 1))


def test_device_without_mechanism() -> None:
    with pytest.raises(ValueError, match=r"cannot share 'meta' memory.*enabled=False to run stock verl"):
        create_staging(torch.device("meta"), 1, SLOT_BYTES)
