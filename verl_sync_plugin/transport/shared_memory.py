"""Staging on CPUs: one file in shared memory, mapped by both processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
import weakref

import torch

from verl_sync_plugin.transport.exports import StagingExport


class SharedMemoryStaging:
    """Sender's end. The file is unlinked as soon as its receivers have mapped it, so that a crash leaves nothing."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._key = uuid.uuid4().hex
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, self._path = tempfile.mkstemp(prefix="verl-sync-", dir=folder)
        os.close(descriptor)
        self._unlink = weakref.finalize(self, _unlink, self._path)
        nbytes = slots * slot_bytes
        self.memory = torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def export(self, reader: int = 0) -> StagingExport:
        return StagingExport("shared_memory", self._key, self.memory.numel(), (self._path,), self.slot_bytes)

    def opened(self) -> None:
        self._unlink()

    def close(self) -> None:
        self._unlink()
        self.memory = torch.empty(0, dtype=torch.uint8)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def open_shared_memory(export: StagingExport) -> torch.Tensor:
    """Maps the sender's file; uint8 of shape ``(nbytes,)``.

    Raises:
        FileNotFoundError: it is not there, as in another container (``from_file`` would make an empty one).
    """
    (path,) = export.handle
    if not os.path.isfile(path) or os.path.getsize(path) != export.nbytes:
        raise FileNotFoundError(f"{path} with the trainer's {export.nbytes} bytes is not visible here")
    return torch.from_file(path, shared=True, size=export.nbytes, dtype=torch.uint8)
