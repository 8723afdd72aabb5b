# SPDX-License-Identifier: Apache-2.0
"""Staging on CPUs: one piece of anonymous shared memory, mapped by both processes.

It has no name in any file system, so nothing of it can stay behind, however its processes end. Who may look at the
trainer's process (the same user, in the same container) opens it through that process's table of open files.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref

import torch

from verl_sync_plugin.transport.memory.exports import StagingExport


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
