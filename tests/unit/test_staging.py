# SPDX-License-Identifier: Apache-2.0
"""Staging memory: what one process writes, another reads."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_sync_plugin.transport.channel import Listener, connect
from verl_sync_plugin.transport.memory import Staging, StagingExport, create_staging, open_staging, slot_of
from verl_sync_plugin.transport.protocol import Hello

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


def hold(address: str, then: str) -> None:
    """The other process: holds staging memory that nobody has opened, and tells how it could be."""
    staging = create_staging(torch.device("cpu"), 2, SLOT_BYTES)
    staging.memory.fill_(5)
    channel = connect(address, WAIT, WAIT)
    channel.send(Hello("1", "digest", (staging.export(),)))
    if then == "fails":
        return  # as a first sync does, with its staging memory still open
    channel.receive(WAIT)


def held(then: str) -> tuple[Any, StagingExport]:
    listener = Listener(WAIT)
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(listener.address, then), daemon=True)
    process.start()
    channel = listener.accept(WAIT)
    assert channel is not None
    (export,) = channel.receive(WAIT).stagings
    process.channel = channel
    listener.close()
    return process, export


def verl_sync_files() -> set[str]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(file) for folder in folders for file in folder.glob("*verl-sync*")}


@pytest.mark.parametrize("then", ["killed", "fails"])
def test_nothing_is_left_of_a_process_that_nobody_has_read_from(then: str) -> None:
    before = verl_sync_files()
    process, export = held(then)
    if then == "killed":
        assert int(open_staging(export).sum()) == 5 * 2 * SLOT_BYTES, "it was there to be read"
        assert verl_sync_files() == before, "not even while it is read"
        process.kill()
    process.join(WAIT)
    assert verl_sync_files() == before and not os.path.lexists(export.handle[0])
    with pytest.raises(FileNotFoundError, match=f"trainer's {2 * SLOT_BYTES} bytes is not visible here"):
        open_staging(export)


def test_memory_outlives_its_owner_where_it_is_mapped() -> None:
    staging = create_staging(torch.device("cpu"), 2, SLOT_BYTES)
    memory, mapped = staging.memory, open_staging(staging.export())
    staging.opened()
    staging.close()
    assert staging.memory.numel() == 0
    memory.fill_(3)
    assert int(mapped.sum()) == 3 * 2 * SLOT_BYTES
    staging.close()


@pytest.mark.parametrize("act", [lambda staging: staging.close(), lambda staging: None], ids=["closed", "forgotten"])
def test_its_file_is_closed_with_it(act: Callable[[Staging], None]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    staging = create_staging(torch.device("cpu"), 1, SLOT_BYTES)
    (path,) = staging.export().handle
    assert os.path.lexists(path)
    act(staging)
    del staging
    assert not os.path.lexists(path) and set(os.listdir("/proc/self/fd")) <= before


def test_other_memory_with_the_same_number_is_not_opened() -> None:
    """As in a container of its own, where the number of the trainer's process is another one's."""
    first, second = (create_staging(torch.device("cpu"), 1, SLOT_BYTES) for _ in range(2))
    with pytest.raises(FileNotFoundError, match="is not visible here"):
        open_staging(replace(first.export(), handle=second.export().handle))
    with pytest.raises(FileNotFoundError, match="is not visible here"):
        open_staging(replace(first.export(), nbytes=2 * SLOT_BYTES))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_open_it() -> None:
    staging = create_staging(torch.device("cpu"), 1, SLOT_BYTES)
    (path,) = staging.export().handle
    code = f"import os; os.setgid(65534); os.setuid(65534); open({path!r})"
    assert "PermissionError" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_device_without_mechanism() -> None:
    with pytest.raises(ValueError, match=r"cannot share 'meta' memory.*enabled=False to run stock verl"):
        create_staging(torch.device("meta"), 1, SLOT_BYTES)
