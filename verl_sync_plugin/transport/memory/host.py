# SPDX-License-Identifier: Apache-2.0
"""Memory of CPUs that two processes see: staging memory, and the files in which parameters lie.

Staging memory is one piece of anonymous shared memory. It has no name in any file system, so nothing of it can be
left over, however its processes end. Who may look at the trainer's process (the same user, in the same container)
opens it through that process's table of open files.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref

import torch

from verl_sync_plugin.transport.memory.exports import Region, StagingExport


class SharedMemoryStaging:
    """The sender's end of staging memory on a CPU."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._key = uuid.uuid4().hex
        descriptor = os.memfd_create(_name(self._key))
        self._let_go = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, slots * slot_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.memory = torch.from_file(self._path, shared=True, size=slots * slot_bytes, dtype=torch.uint8)

    def export(self, reader: int = 0) -> StagingExport:
        return StagingExport("shared_memory", self._key, self.memory.numel(), (self._path,), self.slot_bytes)

    def opened(self) -> None:
        """Does nothing: shared memory needs no notice of its readers."""

    def close(self) -> None:
        self._let_go()
        self.memory = torch.empty(0, dtype=torch.uint8)


def open_shared_memory(export: StagingExport) -> torch.Tensor:
    """Maps the sender's memory; uint8 of shape ``(nbytes,)``.

    Raises:
        FileNotFoundError: it is not there, as in another container, where the same number may be another process's.
    """
    path, found = export.handle[0], ""
    with contextlib.suppress(OSError):
        found = os.readlink(path)
    if found != f"/memfd:{_name(export.key)} (deleted)" or os.path.getsize(path) != export.nbytes:
        raise FileNotFoundError(f"{path} with the trainer's {export.nbytes} bytes is not visible here")
    return torch.from_file(path, shared=True, size=export.nbytes, dtype=torch.uint8)


def _name(key: str) -> str:
    return f"verl-sync-{key}"


class SharedFileExporter:
    """The exporter for CPUs: storages that are mapped from a file (``torch.UntypedStorage.from_file``)."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find(self, run: torch.Tensor) -> tuple[int, int]:
        storage = run.untyped_storage()
        if storage.filename is None:
            raise RuntimeError("its memory is private to the trainer's process")
        self._storages[storage.data_ptr()] = storage
        return storage.data_ptr(), run.data_ptr() - storage.data_ptr()

    def identities(self, allocations: tuple[int, ...]) -> object:
        return allocations

    def export(self, allocation: int) -> Region:
        storage = self._storages[allocation]
        name = str(storage.filename)
        return Region("shared_file", name, storage.nbytes(), (name,))
